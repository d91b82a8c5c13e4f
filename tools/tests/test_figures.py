"""Figures of checks: what is judged where, and how they are listed."""

import pytest
import torch

from testkit.figures import NotRunError, Run, table


@pytest.mark.parametrize(
    ("judged", "value", "passed"),
    [(True, 1.0, True), (True, 1.1, False), (True, float("nan"), False), (False, 1.1, None)],
)
def test_speed_is_judged_at_full_size_on_an_accelerator_only(tmp_path, judged, value, passed):
    run = Run("accelerator" if judged else "cpu", True, tmp_path)
    figure = run.at_most("x", value, 1.01, note="why")
    assert figure.passed is passed
    assert figure.note == ("why" if judged else "not judged on the CPU; why")
    assert run.within("x", value, 1.01).passed is (value <= 1.01)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_run_on_an_accelerator_that_is_not_there(tmp_path):
    with pytest.raises(NotRunError, match="no accelerator was found"):
        _ = Run("accelerator", True, tmp_path).device


def test_figures_are_listed():
    rows = [
        {"check": "a", "name": "f", "value": 1.5, "unit": "s", "goal": "≤ 2", "passed": True, "note": "why"},
        {
            "check": "bb",
            "name": "g",
            "value": 12345678.0,
            "unit": "B",
            "goal": "",
            "passed": None,
            "note": "",
        },
        {"check": "c", "name": "h", "value": 3.0, "unit": "x", "goal": "≤ 2", "passed": False, "note": ""},
    ]
    assert [line.rstrip() for line in table(rows).splitlines()] == [
        "check  figure  value      unit  goal  status    note",
        "a      f       1.5        s     ≤ 2   ok        why",
        "bb     g       1.235e+07  B           measured",
        "c      h       3          x     ≤ 2   FAILED",
    ]
