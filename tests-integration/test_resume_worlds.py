"""T9: a state saved by some ranks is loaded by another number of them: the same samples, the same mathematics."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from testkit import worlds

SIZE, EPOCHS = 48, 3


class Numbers(Dataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size))


class Halving(Sampler):
    """A sampler of one's own: another order in every epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ((index * 5 + self.epoch) % self.size for index in range(self.size))

    def __len__(self):
        return self.size


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def loader_of(kind, batch, size):
    data = Numbers(size)
    if kind == "custom":
        return DataLoader(data, batch, sampler=Halving(size))
    if kind == "custom batches":
        return DataLoader(data, batch_sampler=OwnBatches(RandomSampler(range(size)), batch, False))
    if kind in ("stream", "dispatched stream"):
        return DataLoader(Stream(size), batch)
    return DataLoader(data, batch, shuffle=True)


def prepared(kind, batch, size, split, even=True):
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            split_batches=split,
            even_batches=even,
            use_stateful_dataloader=True,
            use_seedable_sampler=kind == "seeded",
            dispatch_batches="dispatch" in kind,
        ),
    )
    torch.manual_seed(5)
    return accelerator, accelerator.prepare(loader_of(kind, batch, size))


def real_rows(accelerator, loader):
    """This rank's samples of each step, without padding."""
    for rows in loader:
        valid = loader.valid_rows()
        yield rows[: len(rows) if valid is None else valid[accelerator.process_index]].tolist()


def order_until(kind, batch, size, split, even, folder, epoch, steps):
    """This rank's samples by (epoch, step), until a state is saved after `steps` steps of `epoch`."""
    accelerator, loader = prepared(kind, batch, size, split, even)
    found = {}
    while True:
        for step, rows in enumerate(real_rows(accelerator, loader)):
            found[loader.iteration, step] = rows
            if (loader.iteration, step + 1) == (epoch, steps):
                accelerator.save_state(folder)
                return found


def order_after(kind, batch, size, split, even, folder):
    """The samples from a state to the end of the last epoch."""
    accelerator, loader = prepared(kind, batch, size, split, even)
    torch.manual_seed(77)
    accelerator.load_state(folder)
    found = {}
    while loader.iteration < EPOCHS:
        for step, rows in enumerate(real_rows(accelerator, loader)):
            found[loader.iteration, step] = rows
    return found


def joined(found):
    """The samples of all ranks, as they follow each other."""
    steps = sorted({place for rank in found for place in rank})
    return [index for place in steps for rank in found for index in rank.get(place, [])]


def whole_order(kind, batch, size):
    """The oracle: plain torch on one process."""
    torch.manual_seed(5)
    loader = loader_of(kind, batch, size)
    order = []
    for epoch in range(EPOCHS):
        if kind == "custom":
            loader.sampler.set_epoch(epoch)
        order += [index for rows in loader for index in rows.tolist()]
    return order


MOVES = [(2, 1), (2, 3), (2, 4), (1, 2), (3, 2), (4, 2)]


@pytest.mark.parametrize(("before", "after"), MOVES)
@pytest.mark.parametrize("kind", ["shuffle", "custom", "custom batches", "dispatch", "dispatched stream"])
def test_t9_the_same_samples_in_the_same_order(tmp_path, kind, before, after):
    """None lost and none twice, padded or not, split or not."""
    size = 50  # leaves an incomplete round for any number of ranks
    for number, (split, even) in enumerate([(False, True), (True, True), (False, False)]):
        if not even and "dispatch" in kind:
            continue  # dispatching has no such option
        batch, folder = (12 if split else 2), tmp_path / str(number)
        first = joined(worlds.run(order_until, before, kind, batch, size, split, even, folder, 1, 3))
        rest = joined(worlds.run(order_after, after, kind, batch, size, split, even, folder))
        [whole] = worlds.run(whole_order, 1, kind, batch, size)
        assert [*first, *rest] == whole, (split, even)
