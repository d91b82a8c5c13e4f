"""The drawn order equals what torch's own samplers yield: same samples, same draws, at the same moments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_train.data.sampling.batches import Opening, ShardedBatchSampler, open_stream
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.seedable import SeedableRandomSampler


def make_sampler(kind, size, num_samples, generator):
    data = range(size)
    if kind == "sequential":
        return SequentialSampler(data)
    if kind == "random":
        return RandomSampler(data, generator=generator)
    if kind == "random with num_samples":
        return RandomSampler(data, num_samples=num_samples, generator=generator)
    if kind == "replacement":
        return RandomSampler(data, replacement=True, num_samples=num_samples, generator=generator)
    if kind == "subset":
        return SubsetRandomSampler([7 * i for i in data], generator=generator)
    return WeightedRandomSampler([1.0 + i for i in data], num_samples, replacement=True, generator=generator)


KINDS = ["sequential", "random", "random with num_samples", "replacement", "subset", "weighted"]


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 40),
    num_samples=st.integers(1, 100),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    own_generator=st.booleans(),
    seed=st.integers(0, 2**31),
    stop_after=st.integers(0, 12),
)
def test_order_and_draws_equal_torchs(
    kind, size, num_samples, batch, drop_last, own_generator, seed, stop_after
):
    """Two epochs, the first left after `stop_after` batches, with a foreign draw between any two batches."""

    def epochs(arithmetic):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed + 1) if own_generator else None
        sampler = make_sampler(kind, size, num_samples, generator)
        base = BatchSampler(sampler, batch, drop_last)
        seen = []
        for left_early in (True, False):
            stream = open_stream(base, Opening()) if arithmetic else iter(base)
            for count, indices in enumerate(stream):
                seen.append(indices)
                if own_generator:  # the user's generator serves the dataset, too
                    seen.append(torch.rand(1, generator=generator).item())
                if left_early and count == stop_after:
                    break
            seen.append(torch.rand(1).item())
        return seen

    ours, torchs = epochs(True), epochs(False)
    assert ours == torchs


@given(size=st.integers(1, 40), num_samples=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_seedable_order_is_that_of_its_own_iteration(size, num_samples, seed):
    iterated = SeedableRandomSampler(range(size), num_samples=num_samples, data_seed=seed)
    drawn = SeedableRandomSampler(range(size), num_samples=num_samples, data_seed=seed)
    for _ in range(3):
        expected = list(iterated)
        stream = open_stream(BatchSampler(drawn, 4, False), Opening())
        assert [index for indices in stream for index in indices] == expected
        assert drawn.epoch == iterated.epoch


def test_recorded_draw_gives_the_order_again_without_drawing():
    for kind in KINDS[1:]:
        sampler = make_sampler(kind, 20, 30, None)
        base = BatchSampler(sampler, 3, False)
        stream = open_stream(base, Opening())
        first = list(stream)
        state = torch.get_rng_state()
        again = list(open_stream(base, Opening(recorded=stream.record)))
        assert again == first
        assert torch.equal(torch.get_rng_state(), state)


def test_recorded_draw_of_a_users_generator():
    generator = torch.Generator().manual_seed(3)
    base = BatchSampler(RandomSampler(range(20), generator=generator), 3, False)
    stream = open_stream(base, Opening())
    first, after = list(stream), generator.get_state()
    generator.manual_seed(99)
    assert list(open_stream(base, Opening(recorded=stream.record))) == first
    assert torch.equal(generator.get_state(), after)


def test_changed_samplers_are_not_mistaken_for_torchs():
    class Reversed(RandomSampler):
        def __iter__(self):
            return iter(reversed(range(len(self.data_source))))

    class Renamed(RandomSampler):
        pass

    assert order_source(Reversed(range(3))) is None
    assert order_source(Renamed(range(3))) is not None
    assert order_source(range(3)) is None


class _RankZeroSays:
    """Plays a broadcast: rank 0's value is kept and given to the ranks that follow."""

    alone = False

    def __init__(self):
        self.said = []
        self.turn = None

    def rank(self, turn):
        self.turn, self.at = turn, 0

    def _share(self, value):
        if self.turn == 0:
            self.said.append(value)
        self.at += 1
        return self.said[self.at - 1]

    integer = state = _share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_generator", [False, True])
def test_ranks_with_different_streams_agree_on_rank_zeros_order(kind, own_generator):
    sharing, shares, left = _RankZeroSays(), [], []
    for rank in range(3):
        sharing.rank(rank)
        torch.manual_seed(100 + rank)
        before = torch.Generator().manual_seed(100 + rank)
        generator = torch.Generator().manual_seed(rank) if own_generator else None
        base = BatchSampler(make_sampler(kind, 20, 30, generator), 2, False)
        shard = ShardedBatchSampler(base, 3, rank)
        shares.append(list(shard.open(Opening(sharing=sharing))))
        # Every rank has drawn from its own stream as often as rank 0 has from its own.
        left.append(torch.rand(1).item())
        if not own_generator:
            list(make_sampler(kind, 20, 30, before) if kind in ("subset", "weighted") else ())
            if kind in ("random", "random with num_samples", "replacement"):
                torch.empty((), dtype=torch.int64).random_(generator=before)
        assert torch.rand(1, generator=before).item() == left[-1]
    torch.manual_seed(100)
    generator = torch.Generator().manual_seed(0) if own_generator else None
    expected = list(make_sampler(kind, 20, 30, generator))
    together = [i for batches in zip(*shares, strict=True) for batch in batches for i in batch]
    assert together[: len(expected)] == expected
