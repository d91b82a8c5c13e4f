"""The choice of sources: frequencies against their expectation."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.data.mixing.choice import chosen, uniform
from accel_train.data.mixing.weights import WeightsAt

WEIGHTS = st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=8).filter(
    lambda weights: max(weights) > 1e-3
)


def shares(weights):
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def drawn(seed, weights, steps):
    """The places that are chosen, one after the other."""
    return [chosen(seed, step, weights) for step in range(steps)]


def test_uniform_is_splitmix64():
    # The generator as its authors publish it, in its own words: a state that grows by a constant, and a finalizer.
    def splitmix(state):
        mask = 2**64 - 1
        while True:
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = state
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            yield z ^ (z >> 31)

    # Its first output from the state 1234567 is in the published test vectors.
    assert next(splitmix(1234567)) == 6457827717110365317
    state = next(splitmix((3 - 0x9E3779B97F4A7C15) % 2**64))  # the finalizer alone, of the seed 3
    for step, number in zip(range(50), splitmix(state), strict=False):
        assert uniform(3, step) == (number >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_draws_are_uniform_and_uncorrelated(seed):
    count = 20_000
    draws = torch.tensor([uniform(seed, step) for step in range(count)], dtype=torch.float64)
    assert draws.min() >= 0
    assert draws.max() < 1
    bins = torch.histc(draws, 20, 0, 1)
    chi_squared = ((bins - count / 20) ** 2 / (count / 20)).sum()
    assert chi_squared < 45  # 19 degrees of freedom: exceeded once in 1,500 times
    centred = draws - draws.mean()
    for lag in (1, 2, 7):
        correlation = (centred[lag:] * centred[:-lag]).mean() / centred.var()
        assert abs(correlation) < 4 / math.sqrt(count)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 2**32))
def test_random_frequencies_are_within_five_deviations(weights, seed):
    weights, count = shares(weights), 3000
    places = drawn(seed, weights, count)
    for place, share in enumerate(weights):
        found = places.count(place)
        assert abs(found - count * share) <= 5 * math.sqrt(count * share * (1 - share)) + 3
        assert found == 0 or share > 0


def test_choosing_touches_no_global_generator():
    before = torch.get_rng_state(), random.getstate()
    drawn(0, (0.5, 0.5), 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_product_that_is_rounded_up_to_the_sum_belongs_to_the_last_source_with_a_share(monkeypatch):
    monkeypatch.setattr("accel_train.data.mixing.choice.uniform", lambda seed, step: 1.0)
    assert chosen(0, 0, (0.5, 0.5, 0.0)) == 1


def test_weights_that_change_are_followed():
    weights = WeightsAt(lambda step: {"a": 1000 - step, "b": step}, ("a", "b"))
    places = [chosen(0, step, weights.at(step)) for step in range(1000)]
    late, early = sum(places[500:]), sum(places[:500])
    assert abs(early - 125) < 40
    assert abs(late - 375) < 40
