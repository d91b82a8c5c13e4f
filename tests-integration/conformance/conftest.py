"""Prints strategy x property after a run of the suite: `hatch run conformance`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest

from testkit.property_table import PROPERTIES, as_markdown, as_text

_SHOWN = {"passed": "yes", "failed": "FAILED", "error": "FAILED"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--table` prints the table, `--table markdown` as the documentation has it."""
    parser.addoption(
        "--table",
        nargs="?",
        const="text",
        choices=("text", "markdown"),
        help="print strategy x property after the run",
    )


@pytest.fixture(autouse=True)
def _noted_member(request: pytest.FixtureRequest, record_property: Any) -> None:
    """The table's column; names have spaces and dashes, so the test's id does not tell."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "name" in callspec.params:
        record_property("member", callspec.params["name"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One row for each property, one column for each strategy."""
    form = config.getoption("--table", default=None)
    if form is None:
        return
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for outcome, shown in _SHOWN.items():
        for report in terminalreporter.stats.get(outcome, []):
            match = re.search(r"conformance/test_strategies\.py::test_(\w+)", report.nodeid)
            noted = dict(report.user_properties)
            if match is not None and match[1] in PROPERTIES and "member" in noted:
                special = noted.get("shown") if outcome == "passed" else None
                found[match[1], noted["member"]].add(special or shown)
    if found:
        terminalreporter.section("strategy x property")
        for line in as_markdown(found) if form == "markdown" else as_text(found):
            terminalreporter.line(line)
