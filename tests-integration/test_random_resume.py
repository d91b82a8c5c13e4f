"""Random training scripts, stopped after any batch: what is resumed equals a run that was left alone, bit for bit.

`testkit.random_loops` draws a script from a number, and `testkit.random_runs` repeats one.
"""

from __future__ import annotations

import pytest

from testkit.random_loops import KINDS, Case, equal
from testkit.random_runs import describe, failures

SAMPLE = {"single": 4, "ddp": 3, "fsdp2": 2}
CASES = 300


@pytest.mark.wide(but=["fsdp2"])
@pytest.mark.parametrize("strategy", SAMPLE)
def test_a_sample_of_scripts(strategy):
    assert_exact(KINDS[strategy], range(SAMPLE[strategy]))


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("strategy", KINDS)
def test_three_hundred_scripts(strategy):
    assert_exact(KINDS[strategy], range(CASES))


def assert_exact(kind, numbers):
    found = failures(kind, numbers)
    assert not found, "\n\n".join(describe(kind, number, why) for number, why in found.items())


def test_a_number_is_one_script():
    assert Case.draw("ddp", 5) == Case.draw("ddp", 5)
    assert Case.draw("ddp", 5) != Case.draw("ddp", 6)


def test_one_bit_is_a_difference():
    assert equal([1.0, {"a": float("nan")}], [1.0, {"a": float("nan")}])
    assert not equal([0.1 + 0.2], [0.3])
