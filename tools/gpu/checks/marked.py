"""The tests of one file that are marked `gpu`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpu.child import is_own
from gpu.figures import Figure, NotRunError, Run


class Counts:
    """A plugin of pytest that counts how tests end."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.absent = False
        """The file could not be imported for want of a package."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, or skips itself."""
        if report.failed:
            missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", str(report.longrepr))
            if missing is not None and not is_own(missing[1]):
                self.skipped.append(f"{missing[1]} is not installed")
                self.absent = True
            else:
                self.failed.append("the file cannot be collected")
        elif report.skipped:
            self._skip(report)

    def _skip(self, report: Any) -> None:
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        self.skipped.append(reason.removeprefix("Skipped: "))


def run_file(run: Run, root: str, name: str) -> Iterator[Figure]:
    """Run them with pytest, in this process.

    Args:
        run: where; the tests find the accelerator themselves.
        root: of the repository.
        name: of the file, below the root.
    """
    import pytest

    counts = Counts()
    arguments = [
        f"{root}/{name}", "-m", "gpu", "--rootdir", root, "-c", f"{root}/pyproject.toml", "-q",
        "-p", "no:cacheprovider", "--basetemp", str(run.folder / "pytest"),
    ]  # fmt: skip
    code = pytest.main(arguments, plugins=[counts])
    usual = [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED]
    if code not in usual and not (counts.absent and code == pytest.ExitCode.INTERRUPTED):
        counts.failed.append(f"pytest ended with {pytest.ExitCode(code).name}")
    reasons = "; ".join(dict.fromkeys(counts.skipped))
    if not counts.passed and not counts.failed:
        raise NotRunError(reasons or "it has no test that is marked gpu")
    notes = [f"failed: {', '.join(counts.failed)}"] if counts.failed else []
    notes += [f"{len(counts.skipped)} skipped: {reasons}"] if counts.skipped else []
    yield Figure("passed", counts.passed, "tests", "0 failed", not counts.failed, "; ".join(notes))
