"""A linear model with AdamW, a scheduler and a shuffled loader: built, trained for an epoch, and compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build(accelerator: Any, seed: int = 0, width: int = 4) -> Any:
    """The prepared model, optimizer, scheduler and loader."""
    torch.manual_seed(seed)
    model = nn.Linear(width, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(8, width)), batch_size=2, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """One epoch."""
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def snapshot(model: Any, optimizer: Any, scheduler: Any) -> tuple[Any, ...]:
    """Copies of what training changes: weights, moments, the scheduler's step, the state of torch's generator."""
    return (
        [p.detach().clone() for p in model.parameters()],
        [state["exp_avg"].clone() for state in optimizer.state.values()],
        scheduler.scheduler.last_epoch,
        torch.get_rng_state(),
    )
