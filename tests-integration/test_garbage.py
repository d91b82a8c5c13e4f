"""Nothing that an ordinary loop makes waits for Python's collection of reference cycles.

A tensor in a cycle takes memory of the device until then. In a worker process that was forked in the meantime it is
worse: freeing page-locked memory there ends the worker, because CUDA cannot be used after a fork.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, FullyShardedDataParallelPlugin
from testkit import worlds

STRATEGIES = {"ddp": {}, "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}}


@contextlib.contextmanager
def tensors_in_cycles(found: dict[str, int], name: str) -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        found[name] = sum(isinstance(each, torch.Tensor) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def use(options, workers):
    """Tensors that are left in cycles, by what left them."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def train():
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            for x, y in loader:
                accelerator.gather_for_metrics({"found": model(x).argmax(-1), "right": [y]})

    found: dict[str, int] = {}
    train()
    with tempfile.TemporaryDirectory() as own:
        (folder,) = accelerator.gather_for_metrics([own], use_gather_object=True)[:1]
        for name, act in {
            "train": train,
            "evaluate": evaluate,
            "collectives": lambda: accelerator.reduce(accelerator.pad_across_processes({"a": torch.ones(2)})),
            "save": lambda: accelerator.save_state(f"{folder}/state"),
            "save asynchronously": lambda: accelerator.save_state(
                f"{folder}/async", asynchronous=True
            ).result(),
            "load": lambda: accelerator.load_state(f"{folder}/state"),
            "save_model": lambda: accelerator.save_model(model, f"{folder}/model"),
            "leave a loop": lambda: next(iter(loader)),
            "skip": lambda: list(accelerator.skip_first_batches(loader, 2)),
        }.items():
            with tensors_in_cycles(found, name):
                act()
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_one_process(workers):
    (found,) = worlds.run(use, 1, {}, workers)
    assert found == dict.fromkeys(found, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes(strategy):
    for found in worlds.run(use, 2, STRATEGIES[strategy], 0):
        assert found == dict.fromkeys(found, 0)
