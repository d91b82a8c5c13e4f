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
CPU, DEVICES = (ROOT / "tools" / "data" / "strategy_properties.md").read_text().split("simulated devices")


def recorded(page=CPU):
    """Members, cells by test and member, and the table's lines."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and len(line.split("|")) > 11]
    header, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    members = [name.strip("`") for name in header[1:]]
    tests = {label: test for test, label in PROPERTIES.items()}
    cells = {
        (tests[label], member): {cell}
        for label, *found in rows
        for member, cell in zip(members, found, strict=True)
    }
    return members, cells, lines


def test_the_table_has_every_property_and_member_as_the_command_prints_them():
    members, cells, lines = recorded()
    assert tuple(members) == COLUMNS
    assert {test for test, _ in cells} == PROPERTIES.keys()
    printed = [line for line in as_markdown(cells) if not line.startswith("|---")]
    assert printed == lines


def test_the_guide_has_what_differs():
    _, cells, _ = recorded()
    assert "\n".join(differences(cells)) in GUIDE


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
    _, cells, _ = recorded()
    for test in PROPERTIES:
        assert cells[test, member] == {said(member, test)}, test


def test_on_simulated_devices_every_cell_is_that_of_the_cpu():
    _, cpu, _ = recorded()
    members, devices, _ = recorded(DEVICES)
    engines = {name for name in COLUMNS if VARIANTS.get(name, (name,))[0] in {"deepspeed", "xla"}}
    assert members == [name for name in COLUMNS if name not in engines]
    assert {test for test, _ in devices} == PROPERTIES.keys()
    for (test, member), cell in devices.items():
        assert cell == {" ".join(word for word in next(iter(cpu[test, member])).split() if word != "fp8")}


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
