"""Worker processes end with their loader, whoever finds it."""

import gc
import multiprocessing
import pickle
import time
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from accel_train.data import prepare_data_loader


class Numbers(torch.utils.data.Dataset):
    """Says where it is, if it is asked."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def prepare(stateful, persistent):
    loader = DataLoader(
        Numbers(), 2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    return prepare_data_loader(
        loader, num_processes=1, process_index=0, use_stateful_dataloader=stateful, dispatch_batches=False
    )


def workers_of(loader):
    return list(loader._iterator._workers)


@pytest.mark.wide(but=["2-True"])
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("epochs", [0, 2])
def test_workers_end_at_once_when_the_garbage_collector_finds_their_loader(stateful, epochs):
    loader = prepare(stateful, True)
    loader.part_of_a_cycle = loader
    for _ in range(epochs):
        assert len(list(loader)) == 20
    iterator = iter(loader)
    next(iterator)
    del iterator
    workers, gone = workers_of(loader), weakref.ref(loader)
    assert all(worker.is_alive() for worker in workers)
    began = time.monotonic()
    del loader
    gc.collect()
    assert gone() is None
    assert not any(worker.is_alive() for worker in workers)
    assert time.monotonic() - began < 4  # torch waits 5 seconds for a worker that was never told


@pytest.mark.parametrize("stateful", [True, False])
def test_workers_that_are_not_kept_end_with_the_iteration(stateful):
    loader = prepare(stateful, False)
    others = set(multiprocessing.active_children())
    iterator = iter(loader)
    next(iterator)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    del iterator
    assert loader.state_dict()["batches_yielded"] == 1  # what was read is known without them
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.wide(only=["True"])
@pytest.mark.parametrize("stateful", [True, False])
def test_copies_of_a_loader_end_nothing(stateful):
    loader = prepare(stateful, True)
    iterator = iter(loader)
    next(iterator)
    copied = pickle.loads(pickle.dumps(loader))
    del copied
    gc.collect()
    assert all(worker.is_alive() for worker in workers_of(loader))
    assert len(list(iterator)) == 19
