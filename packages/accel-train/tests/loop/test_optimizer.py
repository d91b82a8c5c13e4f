"""The optimizer that `prepare` returns: the wrapped one, which steps only with complete gradients."""

import copy
import pickle

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


def test_a_copied_optimizer_stays_with_its_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*make())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # built on the prepared one, as scripts do
    model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    before = model.weight.detach().clone()
    moved = []
    for x in inputs(4).split(1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(before, model.weight))
        before = model.weight.detach().clone()
    assert moved == [False, True, False, True]
    assert pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "kept"), [((), False), ((None,), False), ((True,), False), ((False,), True)]
)
def test_gradients_are_dropped_unless_zeros_are_asked_for(arguments, kept):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.zero_grad(*arguments)  # None means the default to accelerate 1.15
    assert (model.weight.grad is not None) is kept
