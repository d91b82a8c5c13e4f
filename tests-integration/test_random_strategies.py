"""Random runs that move between strategies and numbers of ranks: all numbers are those of one process in float64.

`testkit.random_strategies` draws a run from a number and says how to repeat one.
"""

from __future__ import annotations

import pytest

from testkit.random_strategies import Case, describe, failures

SAMPLE, CASES = 6, 300


def test_a_sample_of_runs():
    assert_right(range(SAMPLE))


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_three_hundred_runs():
    assert_right(range(CASES))


def assert_right(numbers):
    found = failures(numbers)
    assert not found, "\n\n".join(describe(number, why) for number, why in found.items())


def test_a_number_is_one_run():
    assert Case.draw(5) == Case.draw(5)
    assert Case.draw(5) != Case.draw(6)
