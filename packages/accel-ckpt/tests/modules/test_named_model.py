"""Canonical names that are worked out once."""

import pytest
import torch
from torch import nn

from accel_ckpt import NameCollisionError, canonical_state_dict, optimizer_state_by_name
from accel_ckpt.modules import named_model
from accel_ckpt.modules.named_model import NamedModel, named_models


def build():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].register_buffer("hidden", torch.ones(1), persistent=False)
    return model


def test_names_are_those_of_the_plain_model_whatever_wraps_it(monkeypatch):
    walks = []
    original = named_model.prefixed_modules
    monkeypatch.setattr(
        named_model, "prefixed_modules", lambda module: walks.append(module) or original(module)
    )
    model = build()
    wrapped = nn.DataParallel(torch.compile(model))
    named = NamedModel(wrapped)
    assert list(named.state_dict()) == list(model.state_dict())
    assert all(value is model.get_parameter(name) for name, value in named.parameters().items())
    assert set(named.buffers()) == {n for n, _ in model.named_buffers()}
    assert named.state_dict().keys() == canonical_state_dict(wrapped.state_dict(), wrapped).keys()
    assert walks == [wrapped]


def test_tied_parameters_have_every_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert list(NamedModel(model).parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_two_names_that_become_one_are_refused():
    model = nn.Module()
    model._orig_mod = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(NameCollisionError, match=r"'_orig_mod\.weight'|'weight'"):
        NamedModel(model).state_dict()


def test_optimizers_take_either():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    [named] = named_models([model])
    assert named_models([named]) == [named]
    assert optimizer_state_by_name(optimizer, [named]) == optimizer_state_by_name(optimizer, [model])
