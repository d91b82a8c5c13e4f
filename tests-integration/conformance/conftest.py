"""Prints strategy x property after a run of the suite: `hatch run conformance`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

_SHOWN = {"passed": "yes", "failed": "FAILED", "skipped": "skipped"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--table` prints the table, `--table markdown` as the documentation has it."""
    parser.addoption(
        "--table",
        nargs="?",
        const="text",
        choices=("text", "markdown"),
        help="print strategy x property after the run",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One row for each property, one column for each strategy."""
    form = config.getoption("--table", default=None)
    if form is None:
        return
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    members: set[str] = set()
    for outcome, shown in _SHOWN.items():
        for report in terminalreporter.stats.get(outcome, []):
            match = re.search(r"conformance/test_strategies\.py::test_(\w+)\[(.*)\]", report.nodeid)
            if match is None:
                continue
            member = next(part for part in match[2].split("-") if part.isidentifier() and part not in _WORDS)
            members.add(member)
            special = dict(report.user_properties).get("shown") if outcome == "passed" else None
            found[match[1].replace("_", " ")][member].add(special or shown)
    if not found:
        return
    terminalreporter.section("strategy x property")
    columns = sorted(members)
    rows = [
        [name, *("/".join(sorted(found[name][member])) or "-" for member in columns)]
        for name in sorted(found)
    ]
    for line in _markdown(columns, rows) if form == "markdown" else _text(columns, rows):
        terminalreporter.line(line)


def _text(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    width = max(len(name) for name, *_ in rows)
    yield " " * width + "".join(f"  {member:>13}" for member in columns)
    for name, *cells in rows:
        yield f"{name:<{width}}" + "".join(f"  {cell:>13}" for cell in cells)


def _markdown(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| property | {' | '.join(f'`{member}`' for member in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row)} |"


_WORDS = {"True", "False"}
