"""Random runs that move between strategies and numbers of ranks: all numbers are those of one process in float64.

`testkit.random_strategies` and `testkit.random_language_models` draw a run from a number, and say how to repeat one.
"""

from __future__ import annotations

import pytest

from testkit import random_language_models, random_strategies
from testkit.random_runs import describe, failures

KINDS = {"small": random_strategies.KIND, "language": random_language_models.KIND}
SAMPLES = {"small": 3, "language": 1}
CASES = {"small": 300, "language": 150}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.wide(but=["language"])
@kinds
def test_a_sample_of_runs(kind: str) -> None:
    assert_right(kind, SAMPLES[kind])


@pytest.mark.full
@pytest.mark.timeout(7200)
@kinds
def test_many_runs(kind: str) -> None:
    assert_right(kind, CASES[kind])


def assert_right(kind: str, count: int) -> None:
    if kind == "language":
        pytest.importorskip("transformers")
    found = failures(KINDS[kind], range(count))
    assert not found, "\n\n".join(describe(KINDS[kind], number, why) for number, why in found.items())


@kinds
def test_a_number_is_one_run(kind: str) -> None:
    draw = KINDS[kind].draw
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
