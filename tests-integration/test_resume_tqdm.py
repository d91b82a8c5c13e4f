"""A loop over `tqdm(loader)` resumes exactly, although tqdm begins an iterator that it never uses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

EPOCHS = 3


def loop(folder, stop=None, resume=False, workers=0):
    """Every batch with its epoch; saves after a batch of an epoch, or after the epoch (None)."""
    from accel_train import Accelerator, DataLoaderConfiguration, set_seed, tqdm

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    set_seed(0)
    data = TensorDataset(torch.arange(20.0))
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True, num_workers=workers))
    seen, begin = [], 0
    if resume:
        accelerator.load_state(folder)
        begin = loader.iteration
    for epoch in range(begin, EPOCHS):
        for number, (x,) in enumerate(tqdm(loader, disable=True)):
            seen.append((epoch, x.tolist()))
            if stop == (epoch, number):
                accelerator.save_state(folder)
                return seen
        assert loader.end_of_dataloader
        if stop == (epoch, None):
            accelerator.save_state(folder)
            return seen
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stop", [(0, 0), (1, 2), (1, None)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_loop_over_tqdm_resumes_exactly(tmp_path, ranks, stop, workers):
    whole = worlds.run(loop, ranks, tmp_path, workers=workers)
    before = worlds.run(loop, ranks, tmp_path, stop, workers=workers)
    after = worlds.run(loop, ranks, tmp_path, resume=True, workers=workers)
    for uninterrupted, first, second in zip(whole, before, after, strict=True):
        assert first + second == uninterrupted


def begun_again(folder):
    """A loaded position is kept by iterators that yield nothing, and gone with the first batch."""
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=1))
    for (x,) in loader:
        if x.item() == 2:
            accelerator.save_state(folder)
            break
    accelerator.load_state(folder)
    unused = [iter(loader), iter(loader)]
    continued = [x.item() for (x,) in loader]
    return continued, [x.item() for (x,) in loader], len(unused)


def test_iterators_that_yield_nothing_do_not_use_up_a_position(tmp_path):
    [(continued, again, _)] = worlds.run(begun_again, 1, tmp_path)
    assert continued == [3, 4, 5]
    assert again == [0, 1, 2, 3, 4, 5]
