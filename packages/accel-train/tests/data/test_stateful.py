"""Datasets that say where they are: read from there, not from the beginning."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel_train.data import prepare_data_loader
from accel_train.data.stateful import is_stateful


class Counting(IterableDataset):
    """Says where it is, and counts what is read."""

    def __init__(self, size=23):
        self.size, self.place, self.read, self.going_on = size, 0, 0, False

    def __iter__(self):
        if not self.going_on:
            self.place = 0
        self.going_on = False
        return self.rest()

    def rest(self):
        while self.place < self.size:
            self.place += 1
            self.read += 1
            yield torch.tensor(self.place - 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place, self.going_on = state["place"], True


class Drawing(Dataset):
    """Map-style, with a counter of its own that reading moves on."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 23

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor([index, self.reads])

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


def prepare(dataset, ranks=1, rank=0, stateful=True, workers=0, **options):
    context = "fork" if workers else None
    loader = DataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=context,
        shuffle=None if isinstance(dataset, IterableDataset) else True,
    )  # fmt: skip
    return prepare_data_loader(
        loader, num_processes=ranks, process_index=rank, use_stateful_dataloader=stateful, **options
    )


def resumed(build, batches, **options):
    """The rest of an epoch, uninterrupted and resumed; and the resumed loader."""
    torch.manual_seed(3)
    loader = prepare(build(), **options)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    fresh = prepare(build(), **options)
    torch.manual_seed(9)
    fresh.load_state_dict(state)
    return rest, [batch.tolist() for batch in fresh], fresh


@pytest.mark.wide(but=["*-0", "*-5-2"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 5, 11])
@pytest.mark.parametrize("build", [Counting, Drawing])
def test_t5_it_goes_on_where_the_dataset_was(build, batches, workers):
    rest, again, _ = resumed(build, batches, workers=workers)
    assert again == rest


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("batches", [1, 5])
def test_t5_one_of_two_ranks(rank, batches):
    """The last global batch is completed with the first samples, which are read again."""
    rest, again, _ = resumed(Counting, batches, ranks=2, rank=rank)
    assert again == rest


def test_nothing_is_read_again():
    rest, again, loader = resumed(Counting, 8)
    assert again == rest
    assert loader.dataset.read == 23 - 16


def test_without_the_option_it_is_read_again():
    loader = prepare(Counting(), stateful=False)
    assert not loader.asks_dataset
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["source"] is None


def test_t9_another_number_of_ranks_reads_again():
    loader = prepare(Counting(24), 2, 0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    alone = prepare(Counting(24))
    alone.load_state_dict(loader.state_dict())
    assert next(iter(alone)).tolist() == [12, 13]
    assert alone.dataset.read == 14


def test_a_batch_that_was_read_ahead_is_not_lost():
    loader = prepare(Counting())
    iterator = iter(loader)
    next(iterator)
    assert not loader.end_of_dataloader  # reads the next batch
    state = loader.state_dict()
    fresh = prepare(Counting())
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist() == next(iterator).tolist() == [2, 3]


class Parts(IterableDataset):
    """Each worker reads a part of its own, of another size; draws while it reads."""

    def __init__(self):
        self.place, self.going_on = 0, False

    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        begin, self.going_on = (self.place if self.going_on else 0), False
        for place in range(begin, 5 + 6 * worker):
            self.place = place + 1
            yield torch.tensor([worker * 100 + place, int(torch.randint(0, 1000, ()))])

    def state_dict(self):
        return self.__dict__  # the live one: what is reported must be a copy

    def load_state_dict(self, state):
        self.place, self.going_on = state["place"], True


@pytest.mark.wide(only=["True-2"])
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_end_at_different_times_continue_after_every_batch(workers, persistent):
    def build():
        loader = DataLoader(
            Parts(), 2, num_workers=workers, persistent_workers=persistent, multiprocessing_context="fork"
        )
        return prepare_data_loader(
            loader, num_processes=1, process_index=0, use_stateful_dataloader=True, dispatch_batches=False
        )

    torch.manual_seed(1)
    loader = build()
    states, batches = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    following = [batch[:, 0].tolist() for batch in loader]
    for cut, state in enumerate(states[:-1], start=1):
        fresh = build()
        torch.manual_seed(2)
        fresh.load_state_dict(state)
        assert [batch.tolist() for batch in fresh] == batches[cut:], cut
        assert [batch[:, 0].tolist() for batch in fresh] == following


def test_a_state_in_another_form_is_not_used():
    """One that torchdata made, say: the stream is read again."""
    loader = prepare(Counting())
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    state["source"] = {"_snapshot": {}, "_steps_since_snapshot": 0}
    fresh = prepare(Counting())
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist() == [2, 3]
    assert fresh.dataset.read == 4


class BufferShuffledExamplesIterable:
    """By its name, that of `datasets`."""


@pytest.mark.parametrize("inside", [False, True])
def test_a_stream_with_a_shuffle_buffer_has_no_exact_state(inside):
    dataset = Counting()
    assert is_stateful(dataset)
    examples = BufferShuffledExamplesIterable()
    dataset._ex_iterable = (
        SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=examples)]) if inside else examples
    )
    assert not is_stateful(dataset)
