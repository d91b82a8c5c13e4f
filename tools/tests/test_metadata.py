"""What the packages' metadata, their READMEs and the environments say about dependencies is the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from accel_state.constants import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
OURS = {folder.name for folder in PACKAGES}
OLDEST_TORCH_JOB = (
    (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8").partition("oldest-torch:")[2]
)
ENVIRONMENTS = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]


def _dependencies(folder: Path) -> list[Requirement]:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project["dependencies"]]


def _lower_bound(requirement: Requirement) -> Version:
    (bound,) = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
    return bound


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_readme_has_an_install_line_and_justifies_each_dependency(folder):
    readme = (folder / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Runtime dependencies")[2]
    named = {
        name for row in re.findall(r"^\| ([\w, -]+) \| \S", table, re.MULTILINE) for name in row.split(", ")
    }
    assert named - {"dependency"} == {requirement.name for requirement in _dependencies(folder)}
    assert re.search(r"^```python", readme, re.MULTILINE)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_ranges_are_open_below_and_never_exact(folder):
    for requirement in _dependencies(folder):
        operators = {one.operator for one in requirement.specifier}
        assert ">=" in operators, str(requirement)
        assert "==" not in operators, str(requirement)


def test_every_lower_bound_is_the_version_that_the_lowest_environment_tests():
    pinned = {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in map(Requirement, ENVIRONMENTS["lowest"]["dependencies"])
        if "==" in str(requirement.specifier)
    }
    for folder in PACKAGES:
        for requirement in _dependencies(folder):
            if requirement.name == "torch":
                # Every environment here has one version of torch; the oldest is tested by the job `oldest-torch`.
                assert _lower_bound(requirement).release == OLDEST_TORCH
                assert f"torch=={_lower_bound(requirement)}.0" in OLDEST_TORCH_JOB, str(requirement)
            elif requirement.name not in OURS:
                assert Version(pinned[requirement.name]) == _lower_bound(requirement), str(requirement)


def test_every_environment_that_installs_torch_pins_the_same_one():
    pins = {
        name: [text for text in environment.get("dependencies", []) if Requirement(text).name == "torch"]
        for name, environment in ENVIRONMENTS.items()
        if "dependencies" in environment
        and not ENVIRONMENTS.get(environment.get("template"), environment).get("detached")
    }
    assert set(map(tuple, pins.values())) == {("torch==2.13.0",)}, pins


def test_dependants_allow_compatible_versions_of_their_siblings():
    for folder in PACKAGES:
        for requirement in _dependencies(folder):
            if requirement.name in OURS:
                assert str(requirement.specifier) in {"<0.2,>=0.1", ">=0.1,<0.2"}, str(requirement)
