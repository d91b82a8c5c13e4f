"""Check the commits of a pull request: changelog fragments, and the length of subjects.

Usage: ``python .github/scripts/check_commits.py BASE``, where BASE is the branch or commit to merge into. A commit
that changes the source of a package needs a fragment of that package in the same pull request, unless users
notice nothing of it and its message has the trailer ``No-changelog: <reason>``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SUBJECT = 72
TRAILER = "No-changelog"
_SOURCE = re.compile(r"packages/(?P<package>[^/]+)/src/.+")
_FRAGMENT = re.compile(
    r"packages/(?P<package>[^/]+)/changelog\.d/.+\.(added|changed|fixed|removed|security)\.md"
)
# A release changes the first; the second is generated from the table beside it.
_UNNOTICED = ("/__about__.py", "/__init__.pyi")


@dataclass(frozen=True)
class Commit:
    """A commit of the pull request.

    Attributes:
        name: abbreviated hash.
        message: the whole message.
        paths: files that it adds, changes, moves or deletes.
    """

    name: str
    message: str
    paths: tuple[str, ...]

    @property
    def subject(self) -> str:
        """First line of the message."""
        return self.message.partition("\n")[0]

    @property
    def reason(self) -> str:
        """Why users notice nothing of the commit; empty if it does not say so."""
        match = re.search(rf"^{TRAILER}:[^\S\n]*(\S.*)$", self.message, re.MULTILINE)
        return match[1] if match else ""

    def packages(self) -> set[str]:
        """Packages whose source the commit changes."""
        matches = [_SOURCE.fullmatch(path) for path in self.paths if not path.endswith(_UNNOTICED)]
        return {match["package"] for match in matches if match}


def problems(commits: Sequence[Commit], kept: Sequence[str]) -> list[str]:
    """What to mend before the commits can be merged.

    Args:
        commits: those of the pull request, without merges.
        kept: files that the pull request as a whole adds or changes.
    """
    found = [
        f"{commit.name}: the subject has {len(commit.subject)} characters, at most {MAX_SUBJECT}: "
        f"{commit.subject!r}; shorten it and explain in the body"
        for commit in commits
        if len(commit.subject) > MAX_SUBJECT
    ]
    described = {match["package"] for match in map(_FRAGMENT.fullmatch, kept) if match}
    missing: dict[str, list[str]] = {}
    for commit in commits:
        if not commit.reason:
            for package in commit.packages() - described:
                missing.setdefault(package, []).append(commit.name)
    return found + [
        f"{package}: {', '.join(names)} changed its source without a changelog fragment; add "
        f"packages/{package}/changelog.d/<name>.<added|changed|fixed|removed|security>.md, or the trailer "
        f"'{TRAILER}: <reason>' to each of these commits if users notice nothing"
        for package, names in sorted(missing.items())
    ]


def read(base: str, root: Path) -> tuple[list[Commit], list[str]]:
    """Commits between ``base`` and HEAD, oldest first, and files that they add or change together.

    Raises:
        ValueError: ``base`` names no commit, or has no history in common with HEAD.
    """
    try:
        start = _git(root, "merge-base", base, "HEAD").strip()
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"{base!r} is no commit with a history in common with HEAD: fetch it first ({error.stderr.strip()})"
        ) from error
    commits = []
    for name in _git(
        root, "rev-list", "--reverse", "--no-merges", "--abbrev-commit", f"{start}..HEAD"
    ).split():
        message = _git(root, "show", "--no-patch", "--format=%B", name)
        commits.append(Commit(name, message, tuple(_paths(root, "show", "--format=", "--no-renames", name))))
    return commits, _paths(root, "diff", "--no-renames", "--diff-filter=AM", start, "HEAD")


def _paths(root: Path, *command: str) -> list[str]:
    return [path for path in _git(root, *command, "--name-only", "-z").split("\0") if path]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, text=True, capture_output=True
    ).stdout


if __name__ == "__main__":
    try:
        all_problems = problems(*read(sys.argv[1], Path()))
    except ValueError as error:
        sys.exit(str(error))
    for problem in all_problems:
        print(problem)
    sys.exit(1 if all_problems else 0)
