"""Changelog fragments are named so that towncrier finds them, and a release collects them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").is_file())


def _towncrier(folder: Path, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "towncrier",
        "build",
        *arguments,
        "--version",
        "9.8.7",
        "--date",
        "2020-01-02",
    ]
    command += ["--dir", str(folder), "--config", str(ROOT / "tools/towncrier.toml")]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_every_fragment_is_one_line_and_in_the_draft(package):
    folder = ROOT / "packages" / package
    draft = _towncrier(folder, "--draft")
    for fragment in (folder / "changelog.d").glob("*.md"):
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed|security)\.md", fragment.name), (
            fragment.name
        )
        text = fragment.read_text(encoding="utf-8").strip()
        assert text, fragment.name
        assert "\n" not in text, f"{fragment.name} has more than one line"
        assert f"- {text}" in draft


def test_releases_stack_up_newest_first(tmp_path):
    folder = tmp_path / "packages" / "accel-state"
    shutil.copytree(ROOT / "packages" / "accel-state", folder, ignore=shutil.ignore_patterns("src"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("*.py"))
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    for fragment in (folder / "changelog.d").glob("*.md"):
        fragment.unlink()
    for version, line in (("0.1.0", "First thing."), ("0.2.0", "Second thing.")):
        (folder / "changelog.d" / "a.added.md").write_text(f"{line}\n")
        subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
        command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", version]
        command += ["--date", "2020-01-02"]
        command += ["--dir", str(folder), "--config", str(tmp_path / "tools/towncrier.toml")]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    released = (folder / "CHANGELOG.md").read_text(encoding="utf-8").partition("start -->\n")[2]
    assert released.strip() == (
        "## 0.2.0 (2020-01-02)\n\n### Added\n\n- Second thing.\n\n"
        "## 0.1.0 (2020-01-02)\n\n### Added\n\n- First thing."
    )
    assert not list((folder / "changelog.d").glob("*.md"))
