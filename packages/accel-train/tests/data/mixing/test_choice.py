"""The choice of sources: frequencies against their expectation, and the end of an epoch against stepping there."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.data.mixing.choice import BalancedChoice, RandomChoice, choice_called, uniform, until_end
from accel_train.data.mixing.weights import weights_of
from accel_train.errors import OptionError

WEIGHTS = st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=8).filter(
    lambda weights: max(weights) > 1e-3
)


def shares(weights):
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def drawn(choice, weights, steps, start=0):
    """The places that are chosen, one after the other."""
    places = []
    for step in range(start, start + steps):
        places.append(choice.choose(step, weights))
        choice.take(places[-1], weights)
    return places


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
    places = drawn(RandomChoice(seed), weights, count)
    for place, share in enumerate(weights):
        found = places.count(place)
        assert abs(found - count * share) <= 5 * math.sqrt(count * share * (1 - share)) + 3
        assert found == 0 or share > 0


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_balanced_counts_stay_within_one_of_the_weights(weights):
    weights = shares(weights)
    counts = [0] * len(weights)
    for step, place in enumerate(drawn(BalancedChoice(len(weights)), weights, 400)):
        counts[place] += 1
        for count, share in zip(counts, weights, strict=True):
            assert abs(count - (step + 1) * share) < 1
        assert all(share or not count for count, share in zip(counts, weights, strict=True))


def test_the_largest_deficit_alone_would_not_stay_within_one():
    # Why the rule is Tijdeman's.
    weights = shares([1, 2, 1, 3, 3])
    behind, worst = [0.0] * 5, 0.0
    for _ in range(10):
        behind = [before + share for before, share in zip(behind, weights, strict=True)]
        worst = max(worst, *behind)
        behind[behind.index(max(behind))] -= 1
    assert worst == pytest.approx(1.1)


@pytest.mark.parametrize("name", ["random", "balanced"])
@settings(max_examples=20, deadline=None)
@given(weights=WEIGHTS, cut=st.integers(0, 60), seed=st.integers(0, 99))
def test_an_interrupted_choice_goes_on_as_an_uninterrupted_one(name, weights, cut, seed):
    weights = shares(weights)
    whole = drawn(choice_called(name, seed, len(weights)), weights, 60)
    before = choice_called(name, seed, len(weights))
    assert drawn(before, weights, cut) == whole[:cut]  # a prefix, however far it goes
    after = choice_called(name, seed, len(weights))
    after.load(before.dump())
    copied = before.copy()
    assert drawn(after, weights, 60 - cut, cut) == whole[cut:]
    assert drawn(copied, weights, 60 - cut, cut) == whole[cut:]


def test_choosing_touches_no_global_generator():
    before = torch.get_rng_state(), random.getstate()
    drawn(RandomChoice(0), (0.5, 0.5), 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_source_that_is_behind_and_has_no_weight_any_more_is_not_chosen():
    choice = BalancedChoice(3)
    choice.load([0.9, -0.45, -0.45])
    assert set(drawn(choice, (0.0, 0.5, 0.5), 20)) == {1, 2}


def test_weights_that_change_are_followed():
    weights = weights_of([(0, {"a": 1, "b": 0}), (1000, {"a": 0, "b": 1})], ("a", "b"))
    for choice in (RandomChoice(0), BalancedChoice(2)):
        places = []
        for step in range(1000):
            now = weights.at(step)
            places.append(choice.choose(step, now))
            choice.take(places[-1], now)
        late, early = sum(places[500:]), sum(places[:500])
        assert abs(early - 125) < 40
        assert abs(late - 375) < 40


def stepped(choice, weights, left, every):
    """The same by drawing until it happens."""
    left, steps = list(left), 0
    ended = {place for place, count in enumerate(left) if not count}
    full = [count or 1 for count in left]
    while len(ended) < len(left):
        place = choice.choose(steps, weights.at(steps))
        choice.take(place, weights.at(steps))
        steps += 1
        left[place] -= 1
        if left[place] <= 0:
            ended.add(place)
            left[place] = full[place]
            if not every:
                break
    return steps


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", ["random", "balanced"])
@settings(max_examples=30, deadline=None)
@given(left=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_the_end_is_found_ahead(name, every, left, seed):
    names = [str(place) for place in range(len(left))]
    weights = weights_of({name: 1 + place for place, name in enumerate(names)}, names)
    choice = choice_called(name, seed, len(left))
    remembered = choice.dump()
    found = until_end(choice, weights, 0, left, all_must_end=every, limit=10_000)
    assert choice.dump() == remembered
    assert found == stepped(choice, weights, left, every)


def test_where_the_end_is_not_known():
    names = ("a", "b")
    fixed = weights_of({"a": 1, "b": 1}, names)
    alone = weights_of({"a": 1, "b": 0}, names)
    later = weights_of([(5, {"a": 1, "b": 1}), (10, {"a": 1, "b": 0})], names)
    called = weights_of(lambda step: {"a": 1, "b": 1}, names)

    def end(weights, left, every, limit=1000):
        return until_end(RandomChoice(0), weights, 0, left, all_must_end=every, limit=limit)

    assert end(fixed, [3, None], False) is None
    assert end(fixed, [300, 300], False, limit=20) is None  # not even begun
    assert end(fixed, [15, 15], False, limit=16) is None
    assert end(alone, [3, 3], True) is None
    assert end(alone, [3, 0], True) == 3
    assert end(alone, [3, 3], False) == 3
    assert end(later, [3, 300], True) is None
    assert end(called, [3, 3], True) is None
    assert end(called, [3, 3], False) is not None
    assert end(fixed, [0, 0], True) == 0


def test_an_unknown_choice_is_refused():
    with pytest.raises(OptionError, match=r"'random'.*'balanced'.*got 'greedy'"):
        choice_called("greedy", 0, 2)
