"""Budgets that spread a model. Values are those of Accelerate 1.15, frozen."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_bigmodel import get_balanced_memory
from accel_bigmodel.device_maps import budget


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("memory", "balanced", "low_zero"),
    [
        ({0: 300, 1: 300}, {0: 215, 1: 300}, {0: 0, 1: 300}),
        ({0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, "cpu": 1000}, {0: 0, 1: 300, "cpu": 1000}, {0: 0, 1: 300, "cpu": 1000}),
        ({0: 300, 1: 500}, {0: 215, 1: 500}, {0: 0, 1: 500}),
        ({0: 300, 1: 300, 2: 300}, {0: 175, 1: 175, 2: 300}, {0: 0, 1: 215, 2: 300}),
        ({0: 300, 1: 120}, {0: 215, 1: 120}, {0: 116, 1: 120}),
        ({"cpu": 100}, {"cpu": 100}, {"cpu": 100}),
    ],
)
def test_balanced(memory, balanced, low_zero):
    assert get_balanced_memory(Model(), memory) == balanced
    assert get_balanced_memory(Model(), memory, low_zero=True) == low_zero


def test_blocks_and_dtypes():
    model = nn.Sequential(OrderedDict(a=Model(), b=Model(), c=Model()))
    memory = {0: 600, 1: 600, 2: 600}
    assert get_balanced_memory(model, memory, "Model") == {0: 531, 1: 531, 2: 600}
    assert get_balanced_memory(model, memory, ["Model", "Other"]) == {0: 531, 1: 531, 2: 600}
    assert get_balanced_memory(model, memory) == {0: 333, 1: 333, 2: 600}
    assert get_balanced_memory(model, memory, dtype=torch.float16) == {0: 172, 1: 172, 2: 600}
    assert memory == {0: 600, 1: 600, 2: 600}


def test_one_device_that_nobody_gave_a_budget_keeps_a_tenth(monkeypatch):
    backend = SimpleNamespace(
        mem_get_info=lambda index: (1000, 2000), get_device_properties=lambda index: None
    )
    monkeypatch.setattr(budget, "default_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(budget, "device_count", lambda kind: 1)
    monkeypatch.setattr(budget, "accelerator_module", lambda kind: backend)
    monkeypatch.setattr(budget, "available_host_memory", lambda: 5000)
    assert get_balanced_memory(Model()) == {0: 900, "cpu": 5000}
    assert get_balanced_memory(Model(), reserve=300) == {0: 700, "cpu": 5000}
    assert get_balanced_memory(Model(), {0: 1000}) == {0: 1000}
