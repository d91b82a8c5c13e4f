"""Clipping: complete gradients at their true size, and nothing while a window is being filled."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, GradScalerKwargs


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_clipping_while_accumulating_measures_and_changes_nothing():
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = make()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        before = [p.grad.clone() for p in model.parameters()]
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
    plain = make()
    (plain(x).sum() / 2).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert float(norm) == pytest.approx(float(expected), rel=0.02)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_t34_clipping_what_no_prepared_optimizer_holds_is_refused():
    accelerator = Accelerator(mixed_precision="fp16")
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(model(torch.ones(2, 3)).mean())
    with pytest.raises(
        ValueError, match=r"no prepared optimizer owns these parameters.*prepare\(optimizer\)"
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
