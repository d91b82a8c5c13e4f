"""Tensors that refuse to be used."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from accel_train import OffloadedStatesError
from accel_train.offload.refusal import allow_use, is_refused, refuse_use


def use(tensor):
    return [
        lambda: tensor + 1,
        lambda: tensor.cpu(),
        lambda: tensor.detach(),
        lambda: tensor.data,
        lambda: tensor.item(),
        lambda: tensor.add_(1),
        lambda: torch._foreach_mul_([tensor], 2.0),
        lambda: torch.stack([tensor, tensor]),
        lambda: torch.ops.aten.add.Tensor(tensor, 1),
        lambda: copy.deepcopy(tensor),
        lambda: tensor.numpy(),
        lambda: tensor.data_ptr(),
        lambda: tensor.untyped_storage(),
    ]


@pytest.mark.parametrize("made", [torch.ones(1), nn.Parameter(torch.ones(1))], ids=["tensor", "parameter"])
def test_values_are_refused_and_come_back(made):
    kind = type(made)
    refuse_use(made)
    refuse_use(made)
    for call in use(made):
        with pytest.raises(OffloadedStatesError, match=r"reload_states\(\) first"):
            call()
    assert is_refused(made)
    assert isinstance(made, kind)
    allow_use(made)
    allow_use(made)
    assert type(made) is kind
    assert (made + 1).item() == 2.0


def test_what_needs_no_values_is_answered():
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    refuse_use(parameter)
    assert parameter.shape == (2, 3)
    assert (parameter.numel(), parameter.dim(), len(parameter), parameter.size(1)) == (6, 2, 2, 3)
    assert (parameter.dtype, parameter.device, parameter.is_leaf) == (
        torch.float32,
        torch.device("cpu"),
        True,
    )
    assert parameter.requires_grad
    assert parameter.grad.sum() == 6
    parameter.grad = None
    assert parameter.grad is None
    assert repr(parameter) == "<Parameter of shape [2, 3], in host memory until accelerator.reload_states()>"


@pytest.mark.wide
def test_a_gradient_refuses_that_no_python_object_holds():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    refuse_use(model.weight.grad)
    gc.collect()
    with pytest.raises(OffloadedStatesError):
        model.weight.grad.norm()
    allow_use(model.weight.grad)
    assert model.weight.grad.norm() == 2.0


def test_hooks_of_autograd_stay():
    parameter = nn.Parameter(torch.ones(2))
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    refuse_use(parameter)
    allow_use(parameter)
    (parameter * 3).sum().backward()
    assert torch.equal(seen[0], torch.full((2,), 3.0))


def test_nothing_else_is_refused():
    assert not is_refused(torch.ones(1))
    assert not is_refused(None)
