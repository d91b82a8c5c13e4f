"""The workflows and the scripts they run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BELOW_FIRST = ["accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli"]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".github" / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["docs/index.md", "README.md"], []),
        (["packages/accel-ckpt/README.md"], []),
        (["packages/accel-cli/src/accel_cli/app.py"], ["accel-cli"]),
        (["packages/accel-train/src/accel_train/loop/metrics.py"], ["accel-train", "accel-cli"]),
        (["packages/accel-bigmodel/tests/test_meta.py"], ["accel-bigmodel", "accel-cli"]),
        (["packages/accel-state/src/accel_state/world/topology.py", "docs/index.md"], BELOW_FIRST),
        (["docs/index.md", "pyproject.toml"], BELOW_FIRST),
        (["tools/testkit/worlds.py"], BELOW_FIRST),
        ([".github/workflows/test.yml"], BELOW_FIRST),
    ],
)
def test_a_change_selects_its_package_and_what_lies_above(paths, expected):
    assert _script("changed_packages").affected(paths) == expected


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_permissions_are_least(workflow):
    text = workflow.read_text(encoding="utf-8")
    for used in re.findall(r"uses: (.+)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", used), used
    content = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 30, name
        assert job.get("permissions", {}) in ({}, {"id-token": "write"}), name


def test_only_the_job_that_uploads_may_identify_itself_to_the_registry():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]
    assert "password" not in str(jobs)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "packages" / "accel-ckpt"
    (folder / "src" / "accel_ckpt").mkdir(parents=True)
    (folder / "changelog.d").mkdir()
    (folder / "src" / "accel_ckpt" / "__about__.py").write_text('__version__ = "0.1.0"\n')
    (folder / "CHANGELOG.md").write_text("## 0.1.0 (2020-01-02)\n")
    return tmp_path


def test_a_good_tag(repository):
    assert _script("release_tag").parse("accel-ckpt-v0.1.0", repository) == ("accel-ckpt", "0.1.0")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v0.1.0", "is not <package>-v<version>"),
        ("accel-ckpt-0.1.0", "is not <package>-v<version>"),
        ("accel-other-v0.1.0", "which is not in packages/"),
        ("accel-ckpt-v0.2.0", r"__about__.py says 0\.1\.0"),
    ],
)
def test_a_tag_that_releases_something_else(repository, tag, message):
    with pytest.raises(ValueError, match=message):
        _script("release_tag").parse(tag, repository)


def test_a_tag_before_the_changelog_is_collected(repository):
    folder = repository / "packages" / "accel-ckpt"
    (folder / "changelog.d" / "a.added.md").write_text("A.\n")
    with pytest.raises(ValueError, match=r"fragments are left: \['a\.added\.md'\]"):
        _script("release_tag").parse("accel-ckpt-v0.1.0", repository)
    (folder / "changelog.d" / "a.added.md").unlink()
    (folder / "CHANGELOG.md").write_text("")
    with pytest.raises(ValueError, match=r"no section for 0\.1\.0"):
        _script("release_tag").parse("accel-ckpt-v0.1.0", repository)
