"""Cuts in order; that they are the best ones is tested in test_device_map_properties.py."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from accel_bigmodel.device_maps.contiguous import assign_in_order, units_of
from accel_bigmodel.device_maps.model_outline import Outline


def layers(*sizes):
    """Layers of so many times four bytes."""
    return nn.Sequential(OrderedDict((f"l{i}", nn.Linear(n, 1, bias=False)) for i, n in enumerate(sizes, 1)))


def place(model, disk=math.inf, **budgets):
    named = {int(name[1:]) if name.startswith("d") else name: size for name, size in budgets.items()}
    found = assign_in_order(Outline.of(model), {**named, "disk": disk})
    return None if found is None else list(found.values())


def test_devices_are_filled_in_order():
    assert place(layers(10, 10, 10), d0=80, d1=40) == [0, 0, 1]
    assert place(layers(10, 10, 10), d0=39, d1=200) == [1, 1, 1]


def test_the_first_that_holds_something_keeps_room():
    assert place(layers(10, 20, 10), d0=120, cpu=1000) == [0, "cpu", "cpu"]
    assert place(layers(10, 20, 10), d0=119, cpu=1000) == ["cpu"] * 3
    # The small device stays empty, so that the next one is the one that computes.
    assert place(layers(10, 10, 10, 10), d0=50, d1=80, cpu=1000) == [1, "cpu", "cpu", "cpu"]


def test_the_host_keeps_room_for_what_is_on_disk():
    assert place(layers(10, 10, 10), cpu=80) == ["cpu", "disk", "disk"]
    assert place(layers(10, 10, 10), cpu=79) == ["disk"] * 3
    assert place(layers(10, 10, 10), cpu=120) == ["cpu"] * 3


def test_no_map():
    assert place(layers(10, 10), cpu=40, disk=39) is None
    assert place(layers(10, 10), cpu=80, disk=0) == ["cpu", "cpu"]


def test_tied_layers_are_one_unit():
    model = layers(4, 5, 4, 5)
    model.l3.weight = model.l1.weight
    units = units_of(Outline.of(model))
    assert [(unit.names, unit.size) for unit in units] == [(["l1", "l3"], 16), (["l2"], 20), (["l4"], 20)]
    model.l4.weight = model.l2.weight
    assert [unit.names for unit in units_of(Outline.of(model))] == [["l1", "l3"], ["l2", "l4"]]


def test_many_layers():
    count = 2000
    found = place(layers(*[1] * count), d0=404, cpu=804)
    assert [found.count(device) for device in (0, "cpu", "disk")] == [100, 200, count - 300]
