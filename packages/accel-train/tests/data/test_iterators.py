"""Iterators over prepared loaders: when an iteration begins and ends, and who may go on. Oracle: plain loaders."""

import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from accel_state.monitoring.heartbeat import DATA, FORWARD, OTHER
from accel_train.data import ActiveLoaders, prepare_data_loader
from accel_train.data.iterators import AheadIterator, LoaderIterator, TimedIterator, early_end
from accel_train.data.sampling.index_streams import ArithmeticStream
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.shared_seed import Alone
from accel_train.data.transfer import StreamTransfer
from accel_train.errors import DataError


class Samples:
    """Fails once at a sample, or ends early there."""

    def __init__(self, size, at=None, error=ValueError):
        self.size, self.at, self.error = size, at, error

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.at:
            self.at = None
            raise self.error(f"sample {index}")
        return index


def prepare(dataset=range(6), batch=2, ranks=1, ledger=None, **options):
    return prepare_data_loader(
        DataLoader(dataset, batch, **options), num_processes=ranks, process_index=0, ledger=ledger
    )


def test_making_an_iterator_begins_the_iteration():
    ledger = ActiveLoaders()
    loader = prepare(ledger=ledger)
    iterator = LoaderIterator(loader)
    assert iter(iterator) is iterator
    assert ledger.live == [loader]
    assert loader.current is not None
    assert loader.current.yielded == 0
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert ledger.live == []
    with pytest.raises(StopIteration):
        next(iterator)
    assert loader.iteration == 1, "an epoch is counted once"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_iterator_yields_nothing_more(ranks):
    iterator = LoaderIterator(prepare(range(12), ranks=ranks))
    next(iterator)
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_an_iteration_that_is_left_counts_as_an_epoch(leave):
    ledger = ActiveLoaders()
    loader = prepare(ledger=ledger)
    iterator = LoaderIterator(loader)
    next(iterator)
    if leave == "close":
        iterator.close()
        iterator.close()
    else:
        gone = weakref.ref(iterator)
        del iterator
        gc.collect()
        assert gone() is None
    assert ledger.live == []
    assert loader.iteration == 1
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_an_error_ends_the_iteration_and_not_the_loader():
    ledger = ActiveLoaders()
    loader = prepare(Samples(6, at=3), ledger=ledger)
    iterator = LoaderIterator(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ValueError, match="sample 3"):
        next(iterator)
    assert ledger.live == []
    assert loader.iteration == 1
    assert [batch.tolist() for batch in iterator] == [[4, 5]], "as a plain loader goes on"
    assert len(list(loader)) == 3


def test_reading_on_after_an_error_is_no_early_end():
    loader = prepare(Samples(8, at=0), ranks=2)
    iterator = LoaderIterator(loader)
    with pytest.raises(ValueError, match="sample 0"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5]]


def test_an_iterator_that_cannot_begin_leaves_nothing_live():
    class Broken(SequentialSampler):
        def __iter__(self):
            raise ValueError("no order")

    ledger = ActiveLoaders()
    loader = prepare(sampler=Broken(range(6)), ledger=ledger)
    with pytest.raises(ValueError, match="no order"):
        next(LoaderIterator(loader))
    gc.collect()
    assert ledger.live == []


def test_a_loop_inside_a_loop_gives_the_outer_one_back():
    loader = prepare()
    outer = LoaderIterator(loader)
    next(outer)
    around = loader.current
    assert [batch.tolist() for batch in LoaderIterator(loader)] == [[0, 1], [2, 3], [4, 5]]
    assert loader.current is around
    assert not loader.end_of_dataloader
    assert [batch.tolist() for batch in outer] == [[2, 3], [4, 5]]
    assert loader.end_of_dataloader


def test_an_unused_iterator_does_not_come_back():
    loader = prepare()
    unused = LoaderIterator(loader)
    inner = LoaderIterator(loader)
    mine = loader.current
    next(inner)
    inner.close()
    assert loader.current is mine
    unused.close()


def test_two_iterators_in_turn():
    loader = prepare()
    first, second = LoaderIterator(loader), LoaderIterator(loader)
    seen = []
    for _ in range(3):
        for iterator in (first, second):
            batch = next(iterator)
            seen.append((batch.tolist(), loader.end_of_dataloader))
    assert seen == [([low, low + 1], low == 4) for low in (0, 2, 4) for _ in range(2)]


def test_a_batch_is_moved_and_then_cut():
    loader = prepare()

    class Tenfold:
        def move(self, batch):
            return batch * 10

    loader.shard_batch = lambda batch: batch + 1
    assert [batch.tolist() for batch in LoaderIterator(loader)] == [[1, 2], [3, 4], [5, 6]]
    loader.transfer = Tenfold()
    assert [batch.tolist() for batch in LoaderIterator(loader)] == [[1, 11], [21, 31], [41, 51]]
    loader.shard_batch = None
    assert [batch.tolist() for batch in LoaderIterator(loader)] == [[0, 10], [20, 30], [40, 50]]


class Copies(StreamTransfer):
    def __init__(self):
        self.begun = []

    def start(self, batch):
        self.begun.append(batch.tolist())
        return batch

    def finish(self, ticket):
        return ticket


def test_one_batch_and_no_more_is_on_its_way():
    loader = prepare(Samples(8, at=5))
    loader.transfer = copies = Copies()
    iterator = AheadIterator(loader)
    assert copies.begun == [], "nothing is read before the first batch is asked for"
    assert next(iterator).tolist() == [0, 1]
    assert copies.begun == [[0, 1], [2, 3]]
    assert next(iterator).tolist() == [2, 3], "the error of the batch after it waits"
    with pytest.raises(ValueError, match="sample 5"):
        next(iterator)
    assert loader.iteration == 1
    assert next(iterator).tolist() == [6, 7], "a script that goes on after an error loses no other batch"
    with pytest.raises(StopIteration):
        next(iterator)


class Pulse:
    """Plays the launcher's record of this rank."""

    def __init__(self):
        self.phases = []

    def enter(self, phase):
        self.phases.append(phase)


def test_waiting_for_a_batch_is_timed():
    ledger, pulse = ActiveLoaders(), Pulse()
    loader = prepare(Samples(6), batch=3, ledger=ledger)
    assert [batch.tolist() for batch in TimedIterator(LoaderIterator(loader), pulse)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert pulse.phases == [DATA, FORWARD, DATA, FORWARD, DATA, OTHER]
    failing, pulse = prepare(Samples(2, at=0)), Pulse()
    iterator = TimedIterator(LoaderIterator(failing), pulse)
    assert iter(iterator) is iterator
    with pytest.raises(ValueError, match="sample 0"):
        next(iterator)
    assert pulse.phases == [DATA, OTHER]
    timed = TimedIterator(LoaderIterator(loader), Pulse())
    next(timed)
    assert ledger.live == [loader]
    timed.close()
    assert ledger.live == []


def stream(batches):
    layout = BatchLayout(2 * batches, 2, 1, 0)
    return ArithmeticStream(layout, order_source(SequentialSampler(range(2 * batches))), Alone())


@pytest.mark.parametrize(
    ("batches", "yielded", "ranks", "early"),
    [(3, 2, 2, True), (3, 3, 2, False), (3, 2, 1, False), (None, 2, 2, False)],
)
def test_an_early_end_is_an_error_where_other_ranks_wait(batches, yielded, ranks, early):
    found = early_end(None if batches is None else stream(batches), yielded, ranks)
    assert (found is not None) is early
    if early:
        assert isinstance(found, DataError)
        assert "Reading batch 2 (counted from 0) raised StopIteration" in str(found)


def test_a_dataset_that_ends_early():
    plain = list(DataLoader(Samples(8, at=5, error=StopIteration), 2))
    alone = list(prepare(Samples(8, at=5, error=StopIteration)))
    assert torch.stack(alone).tolist() == torch.stack(plain).tolist() == [[0, 1], [2, 3]]
    loader = prepare(Samples(8, at=4, error=StopIteration), ranks=2)
    iterator = LoaderIterator(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(DataError, match=r"Reading batch 1 .*the sampler yields that batch"):
        next(iterator)
    assert loader.iteration == 1
