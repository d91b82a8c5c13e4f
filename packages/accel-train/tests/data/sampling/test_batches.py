import itertools
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from accel_train.data.sampling.batches import (
    BatchSamplerShard,
    Opening,
    ShardedBatchSampler,
    SkipBatchSampler,
    open_stream,
)
from accel_train.errors import DataError


class Plain(torch.utils.data.Sampler):
    """A sampler that is not torch's own, so that it must be iterated."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size


SAMPLERS = {"by arithmetic": lambda n: SequentialSampler(range(n)), "iterated": Plain}


def shares(n, size, ranks=2, drop_last=False, split=False, even=True, sampler="by arithmetic"):
    base = BatchSampler(SAMPLERS[sampler](n), size, drop_last)
    return [BatchSamplerShard(base, ranks, rank, split, even) for rank in range(ranks)]


def full(start, stop, size, every, rank):
    """Batches of `size` from `start`, one for each `every` samples."""
    return [list(range(s + rank * size, s + (rank + 1) * size)) for s in range(start, stop, every)]


TABLE = [
    # n, batch, drop_last, split, even, tail of rank 0 after the full rounds, tail of rank 1
    (24, 3, False, False, True, [], []),
    (21, 3, False, False, True, [[18, 19, 20]], [[0, 1, 2]]),
    (22, 3, False, False, True, [[18, 19, 20]], [[21, 0, 1]]),
    (20, 3, False, False, True, [[18, 19, 0]], [[1, 2, 3]]),
    (2, 3, False, False, True, [[0, 1, 0]], [[1, 0, 1]]),
    (24, 3, False, False, False, [], []),
    (21, 3, False, False, False, [[18, 19, 20]], []),
    (22, 3, False, False, False, [[18, 19, 20]], [[21]]),
    (20, 3, False, False, False, [[18, 19]], []),
    (2, 3, False, False, False, [[0, 1]], []),
    (24, 3, True, False, True, [], []),
    (21, 3, True, False, True, [], []),
    (22, 3, True, False, True, [], []),
    (20, 3, True, False, True, [], []),
    (2, 3, True, False, True, [], []),
    (21, 3, True, False, False, [], []),
    (24, 4, False, True, True, [], []),
    (22, 4, False, True, True, [[20, 21]], [[0, 1]]),
    (21, 4, False, True, True, [[20, 0]], [[1, 2]]),
    (2, 4, False, True, True, [[0, 1]], [[0, 1]]),
    (24, 4, False, True, False, [], []),
    (22, 4, False, True, False, [[20, 21]], []),
    (21, 4, False, True, False, [[20]], []),
    (2, 4, False, True, False, [[0, 1]], []),
    (24, 4, True, True, True, [], []),
    (22, 4, True, True, True, [], []),
    (21, 4, True, True, True, [], []),
    (2, 4, True, True, True, [], []),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("n", "size", "drop_last", "split", "even", "tail0", "tail1"), TABLE)
def test_distribution_over_two_ranks(n, size, drop_last, split, even, tail0, tail1, sampler):
    each = size // 2 if split else size
    whole = n // (2 * each) * 2 * each
    for rank, tail in ((0, tail0), (1, tail1)):
        share = shares(n, size, 2, drop_last, split, even, sampler)[rank]
        expected = full(0, whole, each, 2 * each, rank) + tail
        assert list(share) == expected
        assert len(share) == len(expected)
        assert share.total_length == len(BatchSampler(range(n), size, drop_last))


def reference(batches, size, ranks, split, even, drop_last):
    """What each rank gets, from the list of all batches and the documented rule, by brute force."""
    samples = [index for batch in batches for index in batch]
    each = size // ranks if split else size
    stride = each * ranks
    if drop_last:
        samples = samples[: len(samples) // stride * stride]
    first = samples[:stride]
    padded, valid = list(samples), []
    if even:
        source = itertools.cycle(first)
        while len(padded) % stride:
            padded.append(next(source))
    out = [[] for _ in range(ranks)]
    for start in range(0, len(padded), stride):
        real = min(len(samples) - start, stride)
        valid.append(tuple(min(max(real - r * each, 0), each) for r in range(ranks)))
        for rank in range(ranks):
            mine = padded[start + rank * each : min(start + (rank + 1) * each, start + stride)]
            if mine:
                out[rank].append(mine)
    return out, valid


@given(
    n=st.integers(0, 60),
    each=st.integers(1, 6),
    ranks=st.integers(1, 5),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    skip=st.integers(0, 4),
)
def test_distribution_follows_the_rule(n, each, ranks, split, even, drop_last, sampler, skip):
    size = each * ranks if split else each
    base = BatchSampler(SAMPLERS[sampler](n), size, drop_last)
    expected, valid = reference(list(base), size, ranks, split, even, drop_last)
    for rank in range(ranks):
        share = ShardedBatchSampler(base, ranks, rank, split, even)
        stream = share.open(Opening())
        got, facts = [], []
        while True:
            # The end is announced before the batch after it is asked for.
            if stream.ends_at(len(got)):
                assert next(stream, None) is None
                break
            got.append(next(stream))
            facts.append((stream.rows(len(got) - 1), stream.valid_rows(len(got) - 1)))
        assert got == expected[rank]
        for batch, counts, (rows, known) in zip(got, valid, facts, strict=False):
            assert rows == len(batch)
            if even:
                assert (known or (each,) * ranks) == counts
            else:
                assert known is None
        assert list(SkipBatchSampler(share, skip)) == expected[rank][skip:]
        assert len(SkipBatchSampler(share, skip)) == len(expected[rank][skip:])


@given(
    n=st.integers(1, 50),
    size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    other_ranks=st.integers(1, 4),
    after=st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_position_carries_over_to_another_number_of_ranks(n, size, ranks, other_ranks, after, drop_last):
    base = BatchSampler(SequentialSampler(range(n)), size, drop_last)
    consumed = {"samples": min(after * size * ranks, n)}
    seen = []
    streams = [
        ShardedBatchSampler(base, other_ranks, rank, even_batches=False).open(Opening(position=consumed))
        for rank in range(other_ranks)
    ]
    for batches in itertools.zip_longest(*streams, fillvalue=[]):
        seen += [index for batch in batches for index in batch]
    rest = list(range(consumed["samples"], n))
    stride = size * other_ranks
    assert seen == (rest[: len(rest) // stride * stride] if drop_last else rest)


class Varying:
    """Batches of varying size, without a batch size."""

    def __init__(self, batches, **attributes):
        self.batches = batches
        self.drop_last = False
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_varying_batches_are_padded_by_whole_batches():
    base = Varying([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10], [11]])
    ranks = [ShardedBatchSampler(base, 2, rank) for rank in range(2)]
    assert [list(rank) for rank in ranks] == [
        [[0, 1, 2], [5, 6, 7, 8], [11]],
        [[3, 4], [9, 10], [0, 1, 2]],
    ]
    assert [len(rank) for rank in ranks] == [3, 3]
    stream = ranks[1].open(Opening())
    facts = [stream.valid_rows(index) for index, _ in enumerate(stream)]
    assert facts == [None, None, (1, 0)]

    uneven = [ShardedBatchSampler(base, 2, rank, even_batches=False) for rank in range(2)]
    assert [list(rank) for rank in uneven] == [[[0, 1, 2], [5, 6, 7, 8], [11]], [[3, 4], [9, 10]]]
    assert [len(rank) for rank in uneven] == [3, 2]

    many = [ShardedBatchSampler(base, 4, rank) for rank in range(4)]
    tails = [[11], [0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert [list(rank) for rank in many] == [list(both) for both in zip(base.batches, tails, strict=False)]
    dropping = Varying(base.batches, drop_last=True)
    dropped = [ShardedBatchSampler(dropping, 2, rank) for rank in range(2)]
    assert [len(list(rank)) for rank in dropped] == [2, 2]


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    ranks=st.integers(1, 4),
    has_size=st.booleans(),
)
def test_t3_no_sample_of_an_irregular_batch_sampler_is_lost(sizes, ranks, has_size):
    """Also with a batch size that not every batch keeps to."""
    numbers = itertools.count()
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    base = Varying(batches, **({"batch_size": 3} if has_size else {}))
    seen, counts = [], []
    for rank in range(ranks):
        stream = ShardedBatchSampler(base, ranks, rank).open(Opening())
        for index, batch in enumerate(stream):
            valid = stream.valid_rows(index)
            seen += batch if valid is None else batch[: valid[rank]]
        counts.append(index + 1)
    assert sorted(seen) == [index for batch in batches for index in batch]
    assert len(set(counts)) == 1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_skipping_batch_sampler_is_shared_out(sampler):
    base = SkipBatchSampler(BatchSampler(SAMPLERS[sampler](22), 3, False), 3)
    ranks = [ShardedBatchSampler(base, 2, rank, even_batches=False) for rank in range(2)]
    assert [list(rank) for rank in ranks] == [
        [[9, 10, 11], [15, 16, 17], [21]],
        [[12, 13, 14], [18, 19, 20]],
    ]
    assert [len(rank) for rank in ranks] == [3, 2]
    even = [ShardedBatchSampler(base, 2, rank).open(Opening()) for rank in range(2)]
    assert [len(list(stream)) for stream in even] == [3, 3]
    assert even[0].valid_rows(2) == (1, 0)


def test_even_batches_can_be_changed_between_epochs():
    share = shares(22, 3)[1]
    assert list(share)[-1] == [21, 0, 1]
    share.even_batches = False
    assert list(share)[-1] == [21]
    share.even_batches = True
    assert list(share)[-1] == [21, 0, 1]


@pytest.mark.parametrize("batch_size", [None, 3, 1, "4", 2.0, True])
def test_a_batch_size_that_cannot_be_split_is_refused(batch_size):
    base = Varying([[0, 1]], batch_size=batch_size)
    with pytest.raises(DataError, match="split_batches=True") as caught:
        ShardedBatchSampler(base, 2, 0, split_batches=True)
    assert repr(batch_size) in str(caught.value) or str(batch_size) in str(caught.value)


def test_batches_of_single_indices_are_shared_out():
    """A loader that does not batch iterates a sampler of indices: each is a batch of its own."""
    for sampler in (Plain(5), SequentialSampler(range(5))):
        ranks = [ShardedBatchSampler(sampler, 2, rank) for rank in range(2)]
        assert [list(rank) for rank in ranks] == [[0, 2, 4], [1, 3, 0]]
        stream = ranks[0].open(Opening())
        facts = [stream.valid_rows(index) for index, _ in enumerate(stream)]
        assert facts[:2] == [None, None]
        assert facts[2][0] > 10**9
        assert facts[2][1] == 0


@given(n=st.integers(1, 40), ranks=st.integers(1, 5), size=st.integers(1, 6), drop_last=st.booleans())
def test_padding_of_torchs_distributed_sampler_is_known(n, ranks, size, drop_last):
    seen = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(n), ranks, rank, shuffle=False)
        stream = open_stream(BatchSampler(sampler, size, drop_last), Opening())
        for index, batch in enumerate(stream):
            valid = stream.valid_rows(index)
            seen += batch if valid is None else batch[: valid[rank]]
    if not drop_last:
        assert sorted(seen) == list(range(n))
    assert len(set(seen)) == len(seen)


def test_t29_cost_of_a_batch_does_not_grow_with_the_world():
    """One rank's epoch takes as many steps of work as it has batches, whatever the number of ranks."""

    class Counting(SequentialSampler):
        """Torch's own, by inheritance, so it is never iterated."""

        iterations = 0

    def cost(world):
        base = BatchSampler(RandomSampler(range(world * 8 * 500)), 8, False)
        share = ShardedBatchSampler(base, world, world - 1)
        stream = share.open(Opening())
        next(stream)  # the draw of the order is not a cost of the batch
        best = math.inf
        for _ in range(3):
            again = share.open(Opening())
            next(again)
            start = time.perf_counter()
            for _ in range(400):
                next(again)
            best = min(best, (time.perf_counter() - start) / 400)
        return best

    one, many = cost(1), cost(256)
    # The peers need hundreds of microseconds at 256 ranks; the margin is for a busy machine.
    assert many < max(8 * one, 50e-6)

    def forbidden(self):
        raise AssertionError("the sampler was iterated")

    Counting.__iter__ = SequentialSampler.__iter__
    sampler = Counting(range(64))
    share = ShardedBatchSampler(BatchSampler(sampler, 4, False), 2, 1)
    original, SequentialSampler.__iter__ = SequentialSampler.__iter__, forbidden
    Counting.__iter__ = forbidden
    try:
        assert next(iter(share)) == [4, 5, 6, 7]
    finally:
        SequentialSampler.__iter__ = original


class Oversized:
    """Says that batches have two samples, and yields more at times."""

    batch_size = 2

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 5), (2, 2, 2, 5), (5,), (2, 2, 1, 4)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_t3_batches_larger_than_their_batch_size_lose_nothing(sizes, ranks, even):
    seen = []
    for rank in range(ranks):
        share = ShardedBatchSampler(Oversized(*sizes), ranks, rank, even_batches=even)
        stream = share.open(Opening())
        for count, batch in enumerate(stream):
            valid = stream.valid_rows(count)
            seen += batch if valid is None else batch[: valid[rank]]
    assert sorted(seen) == list(range(sum(sizes)))


def test_split_batches_refuse_what_is_larger_than_their_batch_size():
    with pytest.raises(DataError, match=r"cuts batches of 2 samples.*one of 3"):
        list(ShardedBatchSampler(Oversized(2, 3), 2, 1, split_batches=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_t3_a_rank_that_gets_nothing_of_a_batch_does_not_end_before_the_others(rank):
    class Short(Oversized):
        batch_size = 4

    uneven = {"split_batches": True, "even_batches": False}
    with pytest.raises(DataError, match=r"nothing of a batch of 2 samples"):
        list(ShardedBatchSampler(Short(4, 2, 4), 2, rank, **uneven))
    batches = list(ShardedBatchSampler(Short(4, 3, 4, 2), 2, rank, **uneven))
    assert batches == [[[0, 1], [4, 5], [7, 8], [11, 12]], [[2, 3], [6], [9, 10]]][rank]
