"""The workflows and the scripts they run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
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
    sys.modules[name] = module  # dataclasses look their module up there
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
        (["packages/accel-state/src/accel_state/clusters/topology.py", "docs/index.md"], BELOW_FIRST),
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


@pytest.fixture
def branch(tmp_path):
    """A repository with one commit; returns a function that commits files and returns the commit's name."""
    source = "packages/accel-ckpt/src/accel_ckpt"

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()

    def commit(message, *paths):
        for path in paths:
            file = tmp_path / path.replace("SOURCE", source).replace(
                "NOTES", "packages/accel-ckpt/changelog.d"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.read_text() + "more\n" if file.exists() else "new\n")
        git("add", ".")
        git("commit", "--quiet", "--message", message)
        return git("rev-parse", "--short", "HEAD")

    git("init", "--quiet", "--initial-branch=main")
    commit("Begin", "SOURCE/old.py", "SOURCE/__init__.pyi", "NOTES/old.added.md")
    git("switch", "--quiet", "--create", "work")
    commit.git = git
    return commit


def _commit_problems(root):
    script = _script("check_commits")
    return script.problems(*script.read("main", root))


def test_a_change_of_source_without_a_fragment_is_a_problem(branch, tmp_path):
    first = branch("Change", "SOURCE/old.py")
    second = branch("Add", "SOURCE/deep/new.py")
    (problem,) = _commit_problems(tmp_path)
    assert problem.startswith(
        f"accel-ckpt: {first}, {second} changed its source without a changelog fragment"
    )


@pytest.mark.parametrize("fragment", ["NOTES/new.fixed.md", "NOTES/old.added.md"])
def test_a_fragment_anywhere_in_the_branch_describes_the_package(branch, tmp_path, fragment):
    branch("Change", "SOURCE/old.py")
    branch("Describe", fragment)
    assert _commit_problems(tmp_path) == []


@pytest.mark.parametrize("fragment", ["NOTES/new.md", "packages/accel-train/changelog.d/new.fixed.md"])
def test_a_fragment_of_no_kind_or_of_another_package_does_not_count(branch, tmp_path, fragment):
    branch("Change", "SOURCE/old.py", fragment)
    assert len(_commit_problems(tmp_path)) == 1


def test_a_deleted_fragment_does_not_count(branch, tmp_path):
    branch("Change", "SOURCE/old.py")
    branch.git("rm", "--quiet", "packages/accel-ckpt/changelog.d/old.added.md")
    branch("Delete")
    assert len(_commit_problems(tmp_path)) == 1


def test_the_trailer_with_a_reason_excuses_its_own_commit(branch, tmp_path):
    branch("Move\n\nNo-changelog: only moved", "SOURCE/old.py")
    assert _commit_problems(tmp_path) == []
    other = branch("Change\n\nNo-changelog:", "SOURCE/old.py")
    (problem,) = _commit_problems(tmp_path)
    assert f"accel-ckpt: {other} changed" in problem


def test_tests_versions_and_stubs_need_no_fragment(branch, tmp_path):
    branch(
        "Other",
        "packages/accel-ckpt/tests/test_a.py",
        "SOURCE/__about__.py",
        "SOURCE/__init__.pyi",
        "docs/a.md",
    )
    assert _commit_problems(tmp_path) == []


def test_a_subject_of_73_characters_is_one_too_many(branch, tmp_path):
    branch("x" * 72 + "\n\n" + "y" * 100, "a.md")
    assert _commit_problems(tmp_path) == []
    name = branch("x" * 73, "a.md")
    (problem,) = _commit_problems(tmp_path)
    assert problem.startswith(f"{name}: the subject has 73 characters, at most 72")


def test_what_others_merged_meanwhile_is_not_checked(branch, tmp_path):
    branch("Mine", "a.md")
    branch.git("switch", "--quiet", "main")
    branch("z" * 80, "SOURCE/old.py")
    branch.git("switch", "--quiet", "work")
    branch.git("merge", "--quiet", "--no-edit", "main")
    assert _commit_problems(tmp_path) == []


def test_a_base_that_is_not_there(branch, tmp_path):
    with pytest.raises(
        ValueError, match="'gone' is no commit with a history in common with HEAD: fetch it first"
    ):
        _script("check_commits").read("gone", tmp_path)


def test_the_workflow_runs_the_check_on_the_whole_history_of_a_pull_request():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))["jobs"][
        "commits"
    ]
    checkout, run = job["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert (ROOT / run["run"].split()[1]).is_file()
    assert run["env"] == {"BASE": "${{ github.event.pull_request.base.sha }}"}
