"""The commands of hatch.toml that run a script of ours: each is started as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = {"accelerate", "boto3", "lightning_fabric", "s3fs"}


def scripts() -> list[str]:
    text = (ROOT / "hatch.toml").read_text(encoding="utf-8")
    commands = [
        line
        for environment in tomllib.loads(text)["envs"].values()
        for script in environment.get("scripts", {}).values()
        for line in (script if isinstance(script, list) else [script])
    ]
    return sorted(
        {found[1] for line in commands if (found := re.match(r"python (tools/\S+\.py) \{args", line))}
    )


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=pytest.mark.full if "/bench/" in script else ()) for script in scripts()],
)
def test_a_script_starts(script):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, script, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    missing = re.search(r"No module named '(\w+)'", result.stderr)
    if missing is not None and missing[1] in PEERS:
        pytest.skip(f"{missing[1]} is not installed; hatch makes the script an environment with it")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
