"""Index batches of one rank, against a list cut by hand and against torch's own samplers."""

import contextlib
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_train.data.sampling.index_streams import (
    ALL_ROWS,
    ArithmeticStream,
    RoundStream,
    SamplerReader,
    SingleIndexStream,
    SingleStream,
)
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.shared_seed import Alone
from accel_train.errors import DataError


def cut(samples, batch, ranks, start, drop_last, even):
    """The oracle: per rank, its batches and how many leading rows of each are real."""
    left, made = samples[start:], [[] for _ in range(ranks)]
    again = itertools.cycle(samples[: batch * ranks])
    while left:
        piece, left = left[: batch * ranks], left[batch * ranks :]
        real = len(piece)
        if real < batch * ranks:
            if drop_last:
                break
            if even:
                piece = piece + list(itertools.islice(again, batch * ranks - real))
        for rank in range(ranks):
            rows = piece[rank * batch : (rank + 1) * batch]
            if rows:
                made[rank].append((rows, max(min(real - rank * batch, batch), 0)))
    return made


def batches_of(samples, size):
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def reader(items, *, ahead=(), pulled=None, keep=8, **options):
    return SamplerReader(iter(items), ahead=list(ahead), pulled=pulled, keep=keep, **options)


def rounds(items, ranks=2, rank=0, *, split=False, size=2, drop_last=False, even=True, **options):
    return RoundStream(
        reader(items),
        ranks=ranks,
        rank=rank,
        split=split,
        batch_size=size,
        drop_last=drop_last,
        even=even,
        record={},
        **options,
    )


def read(stream, rank, *, asks=False):
    """All batches and their real rows; with `asks` the stream is asked before each batch whether it has ended."""
    found = []
    while not (asks and stream.ends_at(len(found))):
        try:
            batch = next(stream)
        except StopIteration:
            assert not asks, "it said that there was another batch"
            break
        number = len(found)
        assert stream.rows(number) == len(batch)
        valid = stream.valid_rows(number)
        found.append((batch, len(batch) if valid is None else min(valid[rank], len(batch))))
    assert stream.ends_at(len(found))
    assert not (found and stream.ends_at(len(found) - 1))
    assert stream.known_to_end(len(found))
    return found


def arithmetic(total, batch, ranks, rank, start=0, drop_last=False, even=True):
    layout = BatchLayout(total, batch, ranks, rank, start=start, drop_last=drop_last, even=even)
    return ArithmeticStream(layout, order_source(SequentialSampler(range(total))), Alone())


CASES = [
    (ranks, drop_last, even) for ranks in (1, 2, 3) for drop_last in (False, True) for even in (False, True)
]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("ranks", "drop_last", "even"), CASES)
def test_every_stream_yields_what_a_list_cut_by_hand_has(ranks, drop_last, even, asks):
    for total, batch in itertools.product(range(12), (1, 2, 3)):
        samples = list(range(total))
        for skipped in (0, 1, 2, 3):
            start = min(skipped * batch, total)
            expected = cut(samples, batch, ranks, start, drop_last, even)
            whole = cut(samples, batch, ranks, min(skipped * batch * ranks, total), drop_last, even)
            for rank in range(ranks):
                stream = arithmetic(total, batch, ranks, rank, start, drop_last, even)
                assert read(stream, rank, asks=asks) == expected[rank]
                options = {"drop_last": drop_last, "even": even, "skip_base": skipped}
                base = batches_of(samples, batch)
                stream = rounds(base, ranks, rank, size=batch, **options)
                assert read(stream, rank, asks=asks) == expected[rank], (base, rank, options)
                base = batches_of(samples, batch * ranks)
                stream = rounds(base, ranks, rank, split=True, size=batch * ranks, **options)
                assert read(stream, rank, asks=asks) == whole[rank], (base, rank, options)


def test_arithmetic_counts_and_positions():
    stream = arithmetic(11, 2, 2, rank=1, start=4, even=False)  # rounds 4-7 and 8-10
    assert (stream.first, stream.count()) == (1, 2)
    assert [stream.consumed(n) for n in range(3)] == [{"samples": 4}, {"samples": 8}, {"samples": 11}]
    shortest = arithmetic(10, 2, 2, rank=0, even=False)  # rank 1 has no third batch
    assert [shortest.ends_at(n) for n in (2, 3)] == [False, True]
    assert [shortest.ends_anywhere_at(n) for n in (1, 2)] == [False, True]
    assert shortest.first_batch() is None, "nothing is drawn"
    next(shortest)
    assert shortest.first_batch() == [0, 1]


def test_nothing_is_drawn_before_begin():
    layout = BatchLayout(5, 2, 1, 0, even=False)
    torch.manual_seed(3)
    expected = list(BatchSampler(RandomSampler(range(5)), 2, False))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    stream = ArithmeticStream(layout, order_source(RandomSampler(range(5))), Alone())
    assert stream.drawn() == {}
    assert torch.equal(torch.get_rng_state(), before)
    stream.begin()
    assert not torch.equal(torch.get_rng_state(), before)
    assert list(stream) == expected
    again = ArithmeticStream(layout, order_source(RandomSampler(range(5))), Alone(), stream.drawn())
    assert list(again) == expected, "a recorded draw is used again"


def test_a_shared_generator_catches_up_with_an_interrupted_run():
    """Two permutations of 4 samples: after three batches of 2 the second has been drawn, its end not."""
    plain = torch.Generator().manual_seed(1)
    torchs = iter(BatchSampler(RandomSampler(range(4), num_samples=8, generator=plain), 2, False))
    expected = [next(torchs) for _ in range(3)]
    at_interruption = plain.get_state()
    expected.append(next(torchs))
    assert next(torchs, None) is None
    at_end = plain.get_state()

    mine = torch.Generator().manual_seed(1)
    source = order_source(RandomSampler(range(4), num_samples=8, generator=mine))
    stream = ArithmeticStream(BatchLayout(8, 2, 1, 0), source, Alone())
    assert [next(stream) for _ in range(3)] == expected[:3]
    assert torch.equal(mine.get_state(), at_interruption)
    record = stream.drawn()
    assert (record["drawn"], record["exhausted"]) == (8, False)

    resumed = ArithmeticStream(BatchLayout(8, 2, 1, 0, start=6), source, Alone(), record)
    mine.manual_seed(99)
    resumed.prime()
    assert torch.equal(mine.get_state(), at_interruption)
    assert list(resumed) == expected[3:]
    assert torch.equal(mine.get_state(), at_end)
    assert resumed.drawn()["exhausted"]


def test_the_draws_of_the_end_change_nothing_in_the_stream():
    mine, plain = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    torchs = RandomSampler(range(4), generator=plain)
    expected = list(torchs)  # draws a permutation, and one more at its end
    stream = ArithmeticStream(
        BatchLayout(4, 4, 1, 0), order_source(RandomSampler(range(4), generator=mine)), Alone()
    )
    stream.finish()
    assert torch.equal(mine.get_state(), torch.Generator().manual_seed(1).get_state()), "nothing was begun"
    assert next(stream) == expected
    stream.finish()
    assert torch.equal(mine.get_state(), plain.get_state())
    assert not stream.drawn()["exhausted"]


def test_single_indices():
    layout = BatchLayout(3, 1, 2, 1)
    stream = SingleIndexStream(layout, order_source(SequentialSampler(range(3))), Alone())
    assert list(stream) == [1, 0]  # the second one repeats the first sample
    assert stream.rows(0) is None, "the dataset decides"
    assert [stream.valid_rows(n) for n in (0, 1)] == [None, (ALL_ROWS, 0)]


def test_a_reader_returns_what_was_read_ahead_before_the_interruption():
    """The sampler draws while it is read, so it yields other items now; 2 of 4 were returned."""
    before = reader([10, 11, 12, 13, 14])
    assert [next(before) for _ in range(4)] == [10, 11, 12, 13]
    saved = before.beyond(2)
    assert saved == {"pulled": 4, "ended": False, "ahead": [12, 13]}
    after = reader([90, 91, 92, 93, 94, 95], position=2, **saved)
    assert after.catch_up()
    assert after.pulled == 4
    assert [next(after) for _ in range(5)] == [90, 91, 12, 13, 94]
    assert (after.pulled, after.taken) == (5, 5)


def test_what_a_reader_had_not_read_is_read_later():
    """A sampler draws while it is read, and again at its end; what an interrupted run had drawn is drawn at once."""
    drawn: list[str] = []

    def sampler():
        for number in range(3):
            drawn.append(f"{number} {'later' if inside else 'at once'}")
            yield number
        drawn.append(f"end {'later' if inside else 'at once'}")

    inside: list[int] = []

    @contextlib.contextmanager
    def later():
        inside.append(1)
        try:
            yield
        finally:
            inside.clear()

    list(reader(sampler(), pulled=2, later=later))
    assert drawn == ["0 at once", "1 at once", "2 later", "end later"]
    drawn.clear()
    before = reader(sampler())
    list(before)
    assert drawn[-1] == "end at once"
    drawn.clear()
    saved = before.beyond(3)
    after = reader(sampler(), position=3, later=later, **saved)
    assert after.catch_up()
    assert drawn == ["0 at once", "1 at once", "2 at once", "end at once"]
    assert list(after) == [0, 1, 2]


def test_a_reader_that_cannot_tell():
    assert not reader([1, 2]).catch_up(), "it is not known how far was read"
    short = reader([1, 2], pulled=5)
    assert short.catch_up(), "a shorter sampler ends"
    assert list(short) == [1, 2]
    forgetful = reader(range(9), keep=1)
    for _ in range(3):
        next(forgetful)
    assert forgetful.beyond(1) == {"pulled": 3, "ended": False, "ahead": []}, "of 2 items 1 is remembered"
    assert forgetful.beyond(3) == {"pulled": 3, "ended": False, "ahead": []}
    odd = reader([object(), object()])
    next(odd)
    assert odd.beyond(0) == {"pulled": 1, "ended": False, "ahead": []}, "no plain data"
    nested = reader([[1, (2, "a")], [3.5]])
    assert [next(nested), nested.beyond(0)["ahead"]] == [[1, (2, "a")], [[1, (2, "a")]]]
    next(nested)
    assert nested.beyond(0)["ahead"] == [], "numbers with a fraction are no indices"


def test_one_rank_reads_the_sampler_as_it_is():
    base = [[0, 1], (2,), 7, [3, 4, 5]]
    stream = SingleStream(reader(base), skip=1, length=lambda: 4)
    assert (stream.first, stream.count(), stream.first_batch()) == (1, 3, None)
    assert list(stream) == [(2,), 7, [3, 4, 5]]
    assert [stream.rows(n) for n in range(3)] == [1, None, 3]
    assert stream.valid_rows(0) is None
    assert stream.first_batch() == [0, 1], "of the epoch, not of what is left"
    assert stream.consumed(1) == {"base_batches": 2, "pulled": 4, "ended": True, "ahead": [7, [3, 4, 5]]}
    assert stream.consumed(3) == {"base_batches": 4, "pulled": 4, "ended": True, "ahead": []}
    assert SingleStream(reader(base)).count() is None
    assert SingleStream(reader([]), skip=2, length=lambda: 0).count() == 0
    assert list(SingleStream(reader([[1]]), skip=5)) == []


def test_a_sampler_that_pads_says_what_is_real():
    facts = {0: (2, 2), 1: (2, 0)}
    stream = SingleStream(reader([[9], [0, 1], [2, 0]]), skip=1, real_rows=lambda n: facts.get(n - 1))
    assert list(stream) == [[0, 1], [2, 0]]
    assert [stream.valid_rows(n) for n in (0, 1)] == [(2, 2), (2, 0)]


def test_facts_are_remembered_for_what_is_in_flight():
    stream = SingleStream(reader([[0] * (n + 1) for n in range(10)]), in_flight=2)
    for _ in range(10):
        next(stream)
    assert [stream.rows(n) for n in range(10)] == [None] * 5 + [6, 7, 8, 9, 10]  # 2 and 3 more
    assert stream.valid_rows(0) is None


def test_asking_for_the_end_reads_one_batch_and_no_more():
    source = iter([[0], [1], [2]])
    stream = SingleStream(SamplerReader(source, ahead=[], pulled=None, keep=8))
    assert next(stream) == [0]
    assert [stream.ends_at(0), stream.ends_at(1), stream.ends_at(1)] == [False, False, False]
    assert not stream.known_to_end(1)
    assert next(source) == [2], "only the second one was read"
    assert next(stream) == [1]
    assert not stream.known_to_end(2), "not yet asked"
    assert stream.ends_at(2)
    assert stream.known_to_end(2)


def test_begin_and_prime_keep_what_they_read():
    stream = SingleStream(reader([[0], [1], [2]]), skip=1)
    stream.begin()
    assert stream.consumed(0) == {"base_batches": 1, "pulled": 2, "ended": False, "ahead": [[1]]}
    assert list(stream) == [[1], [2]]
    unknown = SingleStream(reader([[0], [1], [2]]), skip=1)
    unknown.prime()
    assert unknown.consumed(0)["pulled"] == 2, "a sampler may draw as late as its first batch"
    known = SingleStream(reader([[0], [1], [2]], position=1, pulled=1), skip=1)
    known.prime()
    assert known.consumed(0) == {"base_batches": 1, "pulled": 1, "ended": False, "ahead": []}
    assert list(known) == [[1], [2]]


def each(base, ranks=2, **options):
    return [read(rounds(base, ranks, rank, **options), rank) for rank in range(ranks)]


def test_rounds_of_batches_of_varying_sizes_are_not_cut_up():
    base = [[0, 1, 2], [3], [4, 5]]
    assert each(base, size=None) == [[([0, 1, 2], 3), ([4, 5], 2)], [([3], 1), ([0, 1, 2], 0)]]
    assert each(base, size=None, even=False) == [[([0, 1, 2], 3), ([4, 5], 2)], [([3], 1)]]
    assert each(base, size=None, drop_last=True) == [[([0, 1, 2], 3)], [([3], 1)]]
    # fewer batches than ranks: the first ones are repeated, from the first on
    assert each([[0], [1, 2]], ranks=5, size=None) == [
        [([0], 1)],
        [([1, 2], 2)],
        [([0], 0)],
        [([1, 2], 0)],
        [([0], 0)],
    ]


def test_a_short_batch_in_the_middle_ends_completion_by_samples():
    base = [[0, 1], [2], [3, 4], [5, 6], [7]]
    assert each(base) == [[([0, 1], 2), ([3, 4], 2), ([7], 1)], [([2], 1), ([5, 6], 2), ([0, 1], 0)]]
    # an oversized batch is kept whole
    assert each([[0, 1], [2, 3, 4]]) == [[([0, 1], 2)], [([2, 3, 4], 3)]]


def test_positions_count_base_batches():
    base = batches_of(list(range(10)), 2)
    stream = rounds(base, rank=1, skip_base=2, length=lambda: 3)
    assert (stream.first, stream.count()) == (1, 2)
    next(stream)
    assert stream.consumed(0) == {"base_batches": 2, "pulled": 4, "ended": False, "ahead": [[4, 5], [6, 7]]}
    assert stream.consumed(1) == {"base_batches": 4, "pulled": 4, "ended": False, "ahead": []}
    next(stream)
    assert stream.consumed(2)["base_batches"] == 5, "not beyond what there was"
    split = rounds(batches_of(list(range(10)), 4), split=True, size=4, skip_base=1)
    assert split.first == 1
    next(split)
    assert split.consumed(1)["base_batches"] == 2
    assert rounds(base).count() is None


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(DataError, match=r"cuts batches of 2 samples.*yielded one of 3"):
        list(rounds([[0, 1], [2, 3, 4]], split=True))
    for rank in range(2):  # all ranks find it, also the one that would get something
        stream = rounds([[0], [1, 2]], rank=rank, split=True, even=False)
        with pytest.raises(DataError, match=r"gives the last of 2 ranks nothing of a batch of 1 samples"):
            next(stream)
    assert each([[0, 1], [2]], split=True, even=False) == [[([0], 1), ([2], 1)], [([1], 1)]]
