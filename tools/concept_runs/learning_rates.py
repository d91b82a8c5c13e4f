"""The learning rate of every optimizer step of one epoch, on one process and on two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

BATCHES, WARMUP = 40, 8
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "2 processes": (2, {}),
    "2 processes, scale_scheduler=False": (2, {"scale_scheduler": False}),
}


def record() -> dict[str, Any]:
    """By run: the rates, as shares of the highest."""
    return {
        "batches": BATCHES,
        "warmup": WARMUP,
        "rates": {name: worlds.run(trained, ranks, options)[0] for name, (ranks, options) in RUNS.items()},
    }


def trained(options: dict[str, Any]) -> list[float]:
    """One epoch; the schedule's length is that of the loader before ``prepare``."""
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=4)
    total = len(loader)

    def share(step: int) -> float:
        done = (step - WARMUP) / (total - WARMUP)
        return (step + 1) / WARMUP if step < WARMUP else (1 + math.cos(math.pi * done)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return rates
