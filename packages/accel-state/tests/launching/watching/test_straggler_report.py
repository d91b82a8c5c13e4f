"""Time per phase by rank, and the slow rank."""

import pytest

from accel_state.launching.watching.straggler_report import render_phases, slowest
from accel_state.monitoring.heartbeat import BACKWARD, DATA, FORWARD, PHASES, Pulse


def pulse(steps=10, **milliseconds):
    by_name = {name: phase for phase, name in PHASES.items()}
    spent = dict.fromkeys(PHASES, 0) | {by_name[name]: int(ms * 1e6) for name, ms in milliseconds.items()}
    return Pulse(1, 1, 1, FORWARD, 0, steps, spent)


def test_the_slow_rank_is_the_one_that_others_wait_for_in_backward():
    pulses = {
        0: pulse(data=10, forward=50, backward=900),
        1: pulse(data=410, forward=50, backward=400),
        2: pulse(data=12, forward=50, backward=900),
    }
    rank, ratio, phase = slowest(pulses)
    assert (rank, phase) == (1, DATA)
    assert ratio == pytest.approx(460 / 61)
    text = render_phases(pulses)
    assert "slowest: rank 1, 7.54 times the others' time for data and forward, mostly data" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["1"])
    assert row == ["1", "10", "41.00", "5.00", "40.00", "0.00", "0.00", "0.00"]


def test_ranks_of_several_machines_have_names():
    text = render_phases({0: pulse(data=10), 12: pulse(data=410)}, {0: "a", 12: "a.long.name"})
    rows = [line.split() for line in text.splitlines()]
    assert [row[:3] for row in rows[1:4]] == [
        ["machine", "rank", "steps"],
        ["a", "0", "10"],
        ["a.long.name", "12", "10"],
    ]
    assert "slowest: rank 12 on a.long.name, 41.00 times" in text


def test_equal_ranks_are_not_accused():
    text = render_phases({0: pulse(data=10, forward=50), 1: pulse(data=10, forward=52)})
    assert "no rank is slow: the slowest, rank 1, takes 1.03 times the others' time" in text


def test_saves_are_seconds_in_all():
    assert "1.50" in render_phases({0: pulse(save=1500), 1: pulse(save=1500)})


def test_without_steps_there_is_nothing_to_tell():
    assert render_phases({0: pulse(steps=0), 1: pulse(steps=0)}) == ""
    assert slowest({0: pulse(data=3)}) is None
    assert slowest({0: pulse(), 1: pulse()}) is None
    assert BACKWARD in PHASES
