"""Grain's datasets, by a stand-in with its interface; tests-integration/engines/test_datasets.py has the real ones."""

import copy
import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from accel_train import ArgumentTypeError, GrainDataset
from accel_train.data import prepare_data_loader


class Numbers:
    """As `grain.IterDataset`."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return NumbersIterator(self.order)


class NumbersIterator:
    """As `grain.DatasetIterator`."""

    def __init__(self, order):
        self.order, self.state, self.reads = order, {"next_index": 0}, 0

    def __iter__(self):
        return self

    def __next__(self):
        place = self.state["next_index"]
        if place == len(self.order):
            raise StopIteration
        self.state["next_index"] += 1
        self.reads += 1
        return self.order[place]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def by_epoch(epoch):
    return Numbers(torch.randperm(23, generator=torch.Generator().manual_seed(epoch)).tolist())


def prepare(ranks=1, rank=0, workers=0):
    context = "fork" if workers else None
    loader = DataLoader(GrainDataset(by_epoch), 2, num_workers=workers, multiprocessing_context=context)
    return prepare_data_loader(
        loader, num_processes=ranks, process_index=rank, use_stateful_dataloader=True, dispatch_batches=False
    )


@pytest.mark.wide(but=["0-1-1-*", "1-4-2-*"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cut", [1, 4])
@pytest.mark.parametrize("epoch", [0, 1])
def test_t5_an_epoch_continues(workers, ranks, cut, epoch):
    loader = prepare(ranks, ranks - 1, workers)
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    before = [batch.tolist() for batch in itertools.islice(iterator, cut)]
    state = copy.deepcopy(loader.state_dict())
    rest = [batch.tolist() for batch in iterator]
    fresh = prepare(ranks, ranks - 1, workers)
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == rest
    if ranks == 1 and workers == 0:
        assert [i for batch in before + rest for i in batch] == list(by_epoch(epoch))
    if ranks == 1:
        assert sorted(i for batch in before + rest for i in batch) == list(range(23))


def test_a_state_is_not_changed_by_what_is_read_later():
    stream = GrainDataset(Numbers(range(5)))
    iterator = iter(stream)
    assert stream.state_dict() == {"iterator": {"next_index": 0}, "read": 0}
    assert [next(iterator), next(iterator)] == [0, 1]
    state = stream.state_dict()
    assert list(iterator) == [2, 3, 4]
    again = GrainDataset(Numbers(range(5)))
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert list(again) == [2, 3, 4]
    assert list(again) == [0, 1, 2, 3, 4], "the next epoch begins at its beginning"
    assert state == {"iterator": {"next_index": 2}, "read": 2}


def test_other_objects_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"got list\. Give it to DataLoader itself"):
        GrainDataset([1, 2])
    with pytest.raises(ArgumentTypeError, match="got int"):
        GrainDataset(5)
