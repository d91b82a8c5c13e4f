"""The scheduler that `prepare` returns advances as its optimizer does."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator


def inputs(rows=12):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_schedule_of_fixed_length_may_be_overrun_as_before():
    """As accelerate 1.15 does, on one process too."""
    accelerate = pytest.importorskip("accelerate")

    def curve(accelerator):
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        rates = []
        for x in inputs(7).split(1):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates += scheduler.get_last_lr()
        return rates

    assert curve(Accelerator()) == pytest.approx(curve(accelerate.Accelerator(cpu=True)), rel=1e-12)
