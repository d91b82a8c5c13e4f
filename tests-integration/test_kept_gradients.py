"""An optimizer that steps in every second window keeps gradients of the one before, also in a state saved between.

What the end of a window corrects (its length, its items) is not theirs, before and after a resume.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_train import (
    Accelerator,
    AccumulationError,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
)
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
STEPS = 4


class Stream(IterableDataset):
    """Of unknown length: windows of 4, 4 and 3 micro-batches for each of the ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __iter__(self):
        return (
            torch.tensor([i % 7, i % 5, i % 3, -1.0], dtype=torch.float64) for i in range(22 * self.ranks)
        )


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def run(strategy, items, folder=None, stop=None, resume=False):
    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=STEPS, dataloader_config=config, fsdp_plugin=plugin
    )
    model = net()
    fast = torch.optim.SGD(model[0].parameters(), lr=0.1)
    slow = torch.optim.SGD(model[2].parameters(), lr=0.1)
    loader = DataLoader(Stream(accelerator.num_processes), batch_size=2)
    model, fast, slow, loader = accelerator.prepare(model, fast, slow, loader)
    windows, number = 0, 0
    if resume:
        accelerator.load_state(folder)
        number = accelerator.step
        windows = number // STEPS
    for x in loader:
        number += 1
        with accelerator.accumulate(model):
            loss = model(x).square()
            if items:
                accelerator.backward(loss.sum(), num_items=len(x))
            else:
                accelerator.backward(loss.mean())
            fast.step()
            fast.zero_grad()
            if accelerator.sync_gradients:
                windows += 1
                if windows % 2 == 1 and windows > 1:
                    slow.step()
                    slow.zero_grad()
        if number == stop:
            accelerator.step = number
            accelerator.save_state(folder)
            return None
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def by_hand(ranks):
    """Each loss is a mean over two rows, so that items and micro-batches weigh alike."""
    model = net()
    fast = torch.optim.SGD(model[0].parameters(), lr=0.1)
    slow = torch.optim.SGD(model[2].parameters(), lr=0.1)
    batches = list(DataLoader(Stream(ranks), batch_size=2 * ranks))
    for number, low in enumerate(range(0, len(batches), STEPS), 1):
        window = batches[low : low + STEPS]
        for x in window:
            (model(x).square().mean() / len(window)).backward()
        fast.step()
        fast.zero_grad()
        if number == 3:
            slow.step()
    return model.state_dict()


def all_stops(strategy, items, folder):
    expected = run(strategy, items)
    for stop in (5, 8, 9, 10):
        run(strategy, items, f"{folder}/{stop}", stop)
        found = run(strategy, items, f"{folder}/{stop}", resume=True)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), stop
    return expected


@pytest.mark.parametrize("items", [False, True], ids=["mean", "items"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_a_run_that_stops_inside_a_window_goes_on(tmp_path, strategy, items):
    ranks = 1 if strategy == "single" else 2
    right = by_hand(ranks)
    for found in worlds.run(all_stops, ranks, strategy, items, str(tmp_path)):
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def saved(folder, items):
    run("ddp", items, folder, stop=9)


def continued(folder, items):
    """On another number of ranks: what is kept stays whole, and new gradients are averaged."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, dataloader_config=config)
    model = net()
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    model, *_ = accelerator.prepare(model, *optimizers, DataLoader(Stream(1), batch_size=2))
    try:
        accelerator.load_state(folder)
    except AccumulationError as error:
        return str(error)
    window = accelerator._accumulator.unfinished()[0]
    return {tuple(p.shape): before for p, before in window.kept}


def test_another_number_of_ranks_takes_over_what_is_kept_or_is_refused(tmp_path):
    folder = str(tmp_path / "state")
    for items in (False, True):
        worlds.run(saved, 2, folder, items)
        [one] = worlds.run(continued, 1, folder, items)
        if items:
            assert (
                "keeps gradients of an earlier window. 1 ranks cannot continue there: continue with 2" in one
            )
        else:
            assert {(1, 3), (1,)} == set(one)
