"""Prints strategy x property after a run of the suite: `hatch run conformance`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest

_SHOWN = {"passed": "yes", "failed": "FAILED", "skipped": "skipped"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--table` prints the table."""
    parser.addoption("--table", action="store_true", help="print strategy x property after the run")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One row for each property, one column for each strategy."""
    if not config.getoption("--table", default=False):
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
            found[match[1].replace("_", " ")][member].add(shown)
    if not found:
        return
    columns = sorted(members)
    width = max(map(len, found))
    terminalreporter.section("strategy x property")
    terminalreporter.line(" " * width + "".join(f"  {member:>13}" for member in columns))
    for name in sorted(found):
        cells = ("/".join(sorted(found[name][member])) or "-" for member in columns)
        terminalreporter.line(f"{name:<{width}}" + "".join(f"  {cell:>13}" for cell in cells))


_WORDS = {"True", "False"}
