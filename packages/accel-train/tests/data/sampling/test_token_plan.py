"""Plans of batches by tokens: properties for any lengths, and packing against the rule written as a loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.data.sampling.token_plan import first_fit_decreasing, plan_batches


def plan(lengths, most, ranks, *, seed=0, padded=True, quadratic=0.0, window=None, shuffle=True):
    lengths = np.asarray(lengths, dtype=np.int64)
    draw = np.random.RandomState(seed) if shuffle else None
    order = np.arange(len(lengths)) if draw is None else draw.permutation(len(lengths))
    return plan_batches(
        lengths, most, ranks, order=order, draw=draw, padded=padded, quadratic=quadratic, window=window
    )


def batches_of(found):
    return [
        found.samples[low:high].tolist()
        for low, high in zip(found.bounds[:-1], found.bounds[1:], strict=True)
    ]


cases = st.integers(1, 60).flatmap(
    lambda most: st.tuples(
        st.just(most), st.lists(st.integers(1, most), min_size=0, max_size=120), st.integers(1, 7)
    )
)


@given(cases, st.booleans(), st.sampled_from([0.0, 0.5]), st.sampled_from([None, 1, 10, 50]), st.booleans())
def test_every_sample_comes_once_in_whole_rounds_of_batches_within_the_budget(
    case, padded, quadratic, window, shuffle
):
    most, lengths, ranks = case
    options = {"padded": padded, "quadratic": quadratic, "window": window, "shuffle": shuffle}
    found = batches_of(plan(lengths, most, ranks, **options))
    assert sorted(sample for batch in found for sample in batch) == list(range(len(lengths)))
    for batch in found:
        assert batch
        sizes = [lengths[sample] for sample in batch]
        assert (max(sizes) * len(sizes) if padded else sum(sizes)) <= most
    if len(found) % ranks:  # only where there are fewer samples than whole rounds need
        assert len(lengths) < -(-len(found) // ranks) * ranks
    assert found == batches_of(plan(lengths, most, ranks, **options))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("quadratic", [0.0, 0.01])
def test_rounds_are_far_better_balanced_than_random_ones(padded, quadratic):
    rng = np.random.RandomState(1)
    lengths = np.clip(rng.lognormal(4, 1, 6000).astype(int), 1, 1000)
    most, ranks = 4000, 8

    def cost(batch):
        sizes = lengths[np.asarray(batch)].astype(float)
        costs = sizes + quadratic * sizes**2
        return costs.max() * len(costs) if padded else costs.sum()

    def imbalance(batches):
        rounds = np.asarray([cost(batch) for batch in batches[: len(batches) // ranks * ranks]]).reshape(
            -1, ranks
        )
        return (rounds.max(axis=1) / rounds.mean(axis=1)).mean()

    ours = batches_of(plan(lengths, most, ranks, padded=padded, quadratic=quadratic))
    per_batch = len(lengths) // len(ours)
    order = rng.permutation(len(lengths))
    plain = [order[low : low + per_batch].tolist() for low in range(0, len(order) - per_batch, per_batch)]
    assert len(ours) % ranks == 0
    assert imbalance(plain) > 1.2
    assert imbalance(ours) - 1 < (imbalance(plain) - 1) / 8
    if not (padded and quadratic):  # whose costs per token differ by ten times in one window
        assert imbalance(ours) < 1.01


def test_joined_batches_fill_the_budget():
    rng = np.random.RandomState(2)
    lengths = rng.randint(1, 500, 5000)
    found = plan(lengths, 8192, 4, padded=False)
    assert lengths.sum() / (len(found) * 8192) > 0.95


def test_other_seeds_give_other_batches():
    lengths = np.random.RandomState(3).randint(1, 100, 500)
    first, second = (batches_of(plan(lengths, 400, 2, seed=seed, window=50)) for seed in (0, 1))
    assert {tuple(sorted(batch)) for batch in first} != {tuple(sorted(batch)) for batch in second}


def first_fit(lengths, capacity):
    """The rule, item by item."""
    bins, rooms = [0] * len(lengths), []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        number = next((n for n, room in enumerate(rooms) if room >= lengths[item]), len(rooms))
        if number == len(rooms):
            rooms.append(capacity)
        rooms[number] -= lengths[item]
        bins[item] = number
    return bins


@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=150))
    )
)
def test_packing_is_first_fit_decreasing(case):
    capacity, lengths = case
    found = first_fit_decreasing(np.asarray(lengths, dtype=np.int64), capacity)
    assert found.tolist() == first_fit(lengths, capacity)
