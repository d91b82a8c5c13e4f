from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from accel_bigmodel import DeviceMapError, explain_device_map


def layers(*shapes):
    return nn.Sequential(OrderedDict((f"l{i}", nn.Linear(*shape)) for i, shape in enumerate(shapes, 1)))


def test_reasons_of_an_inferred_map():
    model = layers((4, 4), (4, 4), (4, 4), (10, 10), (4, 4), (4, 4))  # 80, 80, 80, 440, 80, 80
    model.l6.weight = model.l1.weight
    found = explain_device_map(model, "sequential", {0: 700, "cpu": 520})
    assert [(part.module, part.size, part.device, part.why) for part in found.parts] == [
        ("l1", 80, 0, "fits"),
        ("l2", 80, 0, "follows the part before"),
        ("l3", 80, 0, "follows the part before"),
        ("l4", 440, "cpu", "does not fit 0 (20 bytes left, 440 bytes kept for l4)"),
        ("l5", 80, "cpu", "follows the part before"),
        ("l6", 16, 0, "tied to l1.weight"),
    ]
    assert not found.problems


def test_the_table():
    model = layers(*[(4, 4)] * 5)
    found = explain_device_map(model, {"l1": 0, "l2": 0, "l3": 0, "l4": 0, "l5": "disk"}, {0: 400})
    assert str(found).splitlines() == [
        "module                  size  device  why",
        "-" * 89,
        "l1                  80 bytes  0       fits",
        "l2 … l4 (3 parts)  240 bytes  0       follows the part before",
        "l5                  80 bytes  disk    does not fit 0 (0 bytes left, 80 bytes kept for l5)",
        "",
        "device 0: 320 bytes of 400 bytes, and 80 bytes kept for l5, the largest layer to pass through it",
        "device disk: 80 bytes",
    ]


def test_sizes_have_the_units_of_the_budgets():
    text = str(explain_device_map(layers((100, 25)), "sequential", {"cpu": "600KB"}))
    assert "device cpu: 10.10 kB of 600.00 kB" in text


def test_problems_of_a_given_map():
    model = layers((4, 4), (4, 4))
    model.l2.weight = model.l1.weight
    text = str(explain_device_map(model, {"l1.weight": 0, "l1.bias": 0, "l2": 1}, {0: 70, 1: 100}))
    assert "PROBLEM: 0 has 70 bytes, and the map puts 80 bytes on it" in text
    assert "PROBLEM: the tied parameters l1.weight, l2.weight are on different devices" in text


def test_classes_that_stay_whole():
    model = nn.Sequential(layers((4, 4)), layers((4, 4), (4, 4)))
    found = explain_device_map(model, "sequential", {0: 200, 1: 200}, ["Sequential"])
    assert "Sequential is not split" in found.parts[1].why


def test_modules_of_torch_jit():
    found = explain_device_map(
        torch.jit.script(layers((4, 4), (4, 4))), {"l1": 0, "l2": "cpu"}, {0: 160, "cpu": 80}
    )
    assert found.parts[1].why == "does not fit 0 (0 bytes left, 80 bytes kept for l2)"


def test_maps_that_do_not_match_the_model():
    text = str(
        explain_device_map(layers((4, 4), (4, 4)), {"l1": torch.device("cuda", 0), "x": "cuda:1"}, {0: 100})
    )
    assert "device 0: 80 bytes of 100 bytes" in text
    assert "PROBLEM: the model has no 'x'" in text
    assert "PROBLEM: the map has no device for l2.weight, l2.bias" in text


def test_nothing_to_explain():
    assert explain_device_map(nn.Sequential(), max_memory={0: 10}).parts == []


def test_entries_inside_of_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 8))
    found = explain_device_map(model, {"": 0, "1": "cpu", "1.bias": 1}, {0: 1000, 1: 500, "cpu": 3000})
    assert [(part.module, part.size) for part in found.parts] == [("", 80), ("1", 256), ("1.bias", 32)]
    with pytest.raises(DeviceMapError, match="device_map=None is not one of"):
        explain_device_map(model, None)
