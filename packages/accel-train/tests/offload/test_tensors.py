"""Which tensors a model and an optimizer have."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accel_train import Accelerator, AveragedWeights
from accel_train.offload.tensors import HoldsTensors, of_kind, tensors_in, tensors_of_model
from testkit import worlds


def test_tensors_in_nested_containers():
    a, b, c = (torch.full((), float(n)) for n in range(3))
    assert [t.item() for t in tensors_in({"x": [a, (b, None)], 3: {"y": c}, "z": "text"})] == [0.0, 1.0, 2.0]
    assert [*tensors_in(None)] == []


def test_a_model_has_parameters_gradients_and_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    model[0].bias.grad = None
    found = [*tensors_of_model(model)]
    assert {id(t) for kind, t in found if kind == "parameters"} == {
        *map(id, model.parameters()),
        *map(id, model.buffers()),
    }
    grads = [t for kind, t in found if kind == "gradients"]
    assert {*map(id, grads)} == {id(p.grad) for p in model.parameters() if p.grad is not None}
    assert len(grads) == 3


def test_of_kind_names_each():
    tensor = torch.zeros(1)
    assert [*of_kind("optimizer", [tensor])] == [("optimizer", tensor)]


def parts() -> tuple[int, int, int]:
    """Local parts among the tensors of a divided model, and whole gradients that only FSDP has."""
    Accelerator(strategy="fsdp2")
    model = fully_shard(nn.Linear(4, 6))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    whole = model.weight.shape if isinstance(model.weight, DTensor) else None
    found = [*tensors_of_model(model)]
    assert all(isinstance(p, DTensor) for p in model.parameters()), "whole parameters are given up"
    divided = [t for kind, t in found if kind == "parameters" and isinstance(t, DTensor)]
    local = [t for kind, t in found if kind == "parameters" and not isinstance(t, DTensor)]
    hidden = sum(t.numel() for kind, t in found if kind == "gradients")
    assert whole is None or whole == (6, 4)
    return len(divided), len(local), hidden


def test_a_divided_model_has_local_parts_and_gradients_of_an_open_window():
    assert worlds.run(parts, 2) == [(2, 2, 4 * 6 + 6)] * 2


def test_averages_of_weights_have_tensors():
    assert issubclass(AveragedWeights, HoldsTensors)
