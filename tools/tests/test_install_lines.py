"""No page, message or help text lets an installer look for our packages by name: nobody has registered the names."""

import re
import subprocess
from pathlib import Path

import pytest

from accel_state.installing import INSTALL

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
BY_NAME = re.compile(
    rf"\b(?:pip|pipx|uv|poetry|conda)\b[^\n`|]*\b(?:install|add)\b[^\n`]*(?<![/\w-])(?:{'|'.join(PACKAGES)})\b(?!\.git)"
)


def test_nothing_is_installed_by_name():
    command = ["git", "ls-files", "*.md", "*.py", "*.toml", "*.yml", "*.sh", "*.ipynb"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = [
        f"{name}: {match[0]}"
        for name in names
        if not name.endswith("test_install_lines.py")
        for match in BY_NAME.finditer((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_by_name"),
    [
        ("pip install accel-cli", True),
        ("uv add --dev accel-train[wandb]", True),
        ("pip install -U 'accel-ckpt>=0.1'", True),
        ("pip install ./packages/accel-cli", False),
        (INSTALL, False),
    ],
)
def test_what_counts_as_a_name(line, is_by_name):
    assert bool(BY_NAME.search(line)) is is_by_name


def test_the_files_of_requirements_name_the_packages_and_what_they_need():
    needed = {
        "train": ["state", "ckpt", "train"],
        "bigmodel": ["state", "ckpt", "bigmodel"],
        "ckpt": ["state", "ckpt"],
    }
    needed |= {"state": ["state"], "all": ["state", "ckpt", "bigmodel", "train", "cli"]}
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "requirements").iterdir()}
    lines = {
        name: [line for line in text.splitlines() if not line.startswith("#")] for name, text in files.items()
    }
    assert lines == {name: [f"./packages/accel-{part}" for part in parts] for name, parts in needed.items()}
    assert INSTALL.split(",")[0] == "pip install -r requirements/all.txt"
