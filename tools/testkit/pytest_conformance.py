"""``pytest --conformance NAME``: of the conformance suite, run what is about one strategy.

The suite trains under each strategy on several ranks and compares every update with one process that computes it from
all samples. A project has it with one line in a test file, ``from testkit.conformance_suite import *``. ``--table``
prints strategy x property after the run.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("testkit.conformance_suite")

_SHOWN = {"passed": "yes", "failed": "FAILED", "error": "FAILED"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance NAME``, and ``--table``, which prints as the documentation has it with ``markdown``."""
    parser.addoption(
        "--conformance",
        metavar="NAME",
        action="append",
        default=[],
        help="of the conformance suite, run only the tests of the strategy with this name; may be repeated",
    )
    parser.addoption(
        "--table",
        nargs="?",
        const="text",
        choices=("text", "markdown"),
        help="print strategy x property after a run of the conformance suite",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of the suite's tests that repeat others in a larger world."""
    config.addinivalue_line("markers", "full: long")


@pytest.fixture(scope="module")
def kept_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the tests of a module share the processes of their ranks; see `testkit.worlds.kept`.

    Not on simulated devices: a second mesh of them in one process ends it, where torch splits their group.
    """
    from testkit import worlds

    with worlds.kept() if request.config.getoption("--device", None) is None else contextlib.nullcontext():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the suite's tests of the named strategies, and note for the table whose test each is."""
    names = config.getoption("--conformance")
    if names:
        _check(names)
    kept, left = [], []
    for item in items:
        member = _member(item)
        if member is not None:
            item.user_properties.append(("member", member))
        (left if names and member not in {None, *names} else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _member(item: pytest.Item) -> str | None:
    """The strategy that a test of the suite is about; None for other tests."""
    function = getattr(item, "function", None)
    if not getattr(function, "__module__", "").endswith("conformance_suite"):
        return None
    return str(item.callspec.params["name"])  # type: ignore[attr-defined]  # all tests of the suite have parameters


def _check(names: list[str]) -> None:
    from testkit.conformance_suite import FOUND, MEMBERS

    for name in names:
        if name in MEMBERS:
            continue
        if name in FOUND:
            missing = ", ".join(FOUND[name].capabilities.requires)
            raise pytest.UsageError(
                f"--conformance {name}: this strategy needs {missing}, not installed here"
            )
        raise pytest.UsageError(
            f"--conformance {name}: no strategy of this name is registered here, only {', '.join(MEMBERS)}. "
            "Install the package that has it; its entry point is in the group accel_train.strategies"
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One row for each property, one column for each strategy."""
    form = config.getoption("--table")
    if form is None:
        return
    from testkit.property_table import PROPERTIES, as_markdown, as_text

    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for outcome, shown in _SHOWN.items():
        for report in terminalreporter.stats.get(outcome, []):
            test = report.nodeid.partition("::test_")[2].partition("[")[0]
            noted = dict(report.user_properties)
            if test in PROPERTIES and "member" in noted:
                special = noted.get("shown") if outcome == "passed" else None
                found[test, noted["member"]].add(special or shown)
    if found:
        terminalreporter.section("strategy x property")
        for line in as_markdown(found) if form == "markdown" else as_text(found):
            terminalreporter.line(line)
