"""`model.zero_grad()` of a divided model, against plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from accel_train import Accelerator, FullyShardedDataParallelPlugin
from testkit import worlds


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 2)
    )


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def gradients():
    """The gradients of each rank after a call between a backward, `zero_grad` and another backward."""
    found = []
    for way in ("evaluated", "forward first", "not"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = accelerator.prepare(make())
        accelerator.backward(model(X).square().sum())
        if way == "evaluated":
            with torch.no_grad():
                model(X)
            model.zero_grad()
            loss = model(2 * X).square().sum()
        elif way == "forward first":
            loss = model(2 * X).square().sum()
            model.zero_grad()
        else:
            loss = model(2 * X).square().sum()
        accelerator.backward(loss)
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    return found


def test_gradients_are_dropped_while_a_unit_is_gathered():
    plain = make()
    plain(2 * X).square().sum().backward()
    second = [parameter.grad.clone() for parameter in plain.parameters()]
    plain(X).square().sum().backward()
    both = [parameter.grad for parameter in plain.parameters()]
    for evaluated, forward_first, kept in worlds.run(gradients, 2):
        torch.testing.assert_close(evaluated, second)
        torch.testing.assert_close(forward_first, second)
        torch.testing.assert_close(kept, both)
