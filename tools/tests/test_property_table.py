"""The table strategy x property is what the command prints and what strategies say of themselves; the guide fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel_train.precision.registry import PRECISIONS
from accel_train.strategies.registry import STRATEGIES
from testkit.conformance import VARIANTS
from testkit.property_table import COLUMNS, OTHER_TESTS, PROPERTIES, as_markdown, as_text, differences

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "strategies.md").read_text()
TABLE = (ROOT / "tools" / "data" / "strategy_properties.md").read_text()


def recorded():
    """Members, cells by test and member, and the table's lines."""
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    header, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    members = [name.strip("`") for name in header[1:]]
    tests = {label: test for test, label in PROPERTIES.items()}
    cells = {
        (tests[label], member): {cell}
        for label, *found in rows
        for member, cell in zip(members, found, strict=True)
    }
    return members, cells, lines


MEMBERS, CELLS, LINES = recorded()


def test_the_table_has_every_property_and_member_as_the_command_prints_them():
    assert tuple(MEMBERS) == COLUMNS
    assert {test for test, _ in CELLS} == PROPERTIES.keys()
    assert [line for line in as_markdown(CELLS) if not line.startswith("|---")] == LINES


def test_the_guide_has_what_differs():
    assert "\n".join(differences(CELLS)) in GUIDE


def test_every_test_of_the_suite_is_a_property():
    suite = (ROOT / "tools" / "testkit" / "conformance_suite.py").read_text()
    assert set(re.findall(r"^def test_(\w+)\(", suite, re.MULTILINE)) == PROPERTIES.keys() | OTHER_TESTS


def said(member, test):
    """The cell that follows from what a strategy says of itself."""
    strategy = STRATEGIES.get(VARIANTS.get(member, (member, {}))[0])
    capabilities = strategy.capabilities
    if test == "training":
        declared = capabilities.precisions_for("cpu")
        return " ".join(sorted(PRECISIONS.names() if declared is None else declared))
    refused = {
        "items": not capabilities.num_items,
        "uneven": member != "single" and not strategy.capabilities.separate_steps,
        "t34_clipping_of_several_optimizers": capabilities.prepares_together,
        "t45_optimizers_follow_replaced_parameters": capabilities.prepares_together,
        "resume_inside_a_window": not capabilities.saves_windows,
    }
    return "refused" if refused.get(test) else "yes"


@pytest.mark.parametrize("member", COLUMNS)
def test_cells_are_what_strategies_declare(member):
    for test in PROPERTIES:
        assert CELLS[test, member] == {said(member, test)}, test


def test_failures_and_parts_are_shown():
    found = {
        ("training", "fsdp2"): {"no", "FAILED"},
        ("frozen", "outside"): {"yes"},
        ("frozen", "fake"): {"yes"},
    }
    assert list(as_text(found)) == [
        "                                           fsdp2  fake  outside",
        "training as one process, by precision  FAILED/no     -        -",
        "frozen parameters                              -   yes      yes",
    ]
    assert list(as_markdown(found))[2] == "| training as one process, by precision | FAILED/no | - |"
