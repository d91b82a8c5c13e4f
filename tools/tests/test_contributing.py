"""What CONTRIBUTING.md names is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_folders_of_the_questions_are_there():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "accel_" in line]
    named = set()
    for row in rows:
        package = ""
        for path in re.findall(r"`([\w/]+)/`", row.split("|")[2]):
            package = path.partition("/")[0] if path.startswith("accel_") else package
            named.add(path if path.startswith("accel_") else f"{package}/{path}")
    folders = (path.parent for path in ROOT.glob("packages/*/src/**/__init__.py"))
    there = {"/".join(path.parts[path.parts.index("src") + 1 :]) for path in folders}
    assert len(rows) >= 8
    assert named - there == set()


def test_the_commands_are_scripts_of_hatch():
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    commands = re.findall(r"hatch run ([\w:-]+)", TEXT)
    assert "check" in commands
    for command in commands:
        if command == "pytest":  # the program itself, in the default environment
            continue
        environment, _, script = command.rpartition(":")
        inherited = environments["default"]["scripts"]
        assert script in inherited | environments[environment or "default"].get("scripts", {}), command


def test_the_scripts_and_modules_are_there():
    paths = re.findall(r"(?:\.github|tools|packages|docs)/[\w./-]+\.(?:py|md|yml)", TEXT)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []
