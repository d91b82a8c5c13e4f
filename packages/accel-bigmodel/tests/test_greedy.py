from __future__ import annotations

from collections import OrderedDict

from torch import nn

from accel_bigmodel import compute_module_sizes, fallback_allocate, find_tied_parameters
from accel_bigmodel.greedy import main_devices, place_greedily
from accel_bigmodel.outline import Outline


def named(**modules):
    return nn.Sequential(OrderedDict(modules))


def model():
    return named(a=named(x=nn.Linear(10, 10), y=nn.Linear(4, 4)), b=nn.Linear(2, 2))  # 440, 80, 24


def fallback(tree, limit, **options):
    return fallback_allocate(list(tree.named_children()), compute_module_sizes(tree), limit, **options)


def test_fallback_finds_the_first_part_that_fits():
    tree = model()
    name, part, rest = fallback(tree, 100)
    assert (name, part) == ("a.y", tree.a.y)
    assert [name for name, _ in rest] == ["a.x", "b"]
    assert fallback(tree, "1KB")[0] == "a"
    assert fallback(tree, 100, no_split_module_classes=["Sequential"])[0] == "b"


def test_fallback_finds_nothing():
    tree = model()
    for limit in (10, -1):
        name, part, rest = fallback(tree, limit)
        assert name is part is None
        assert [name for name, _ in rest] == ["a", "b"]


def test_fallback_counts_tied_parts_together():
    tree = named(a=nn.Linear(4, 4), b=nn.Linear(10, 10), c=nn.Linear(4, 4), d=nn.Linear(4, 4))
    tree.c.weight = tree.a.weight
    ties = find_tied_parameters(tree)
    assert fallback(tree, 80, tied_parameters=ties)[0] == "d"
    assert fallback(tree, 96, tied_parameters=ties)[0] == "a"


def test_main_devices():
    assert main_devices([0, 1, "cpu", "disk"]) == [0, "cpu"]
    assert main_devices(["cpu", "disk"]) == ["cpu"]
    assert main_devices([0, "mps", "cpu"]) == ["mps"]


def test_what_would_have_fitted():
    placed = place_greedily(Outline.of(model()), {0: 100, "cpu": 10000, "disk": 10000})
    assert placed.complete
    assert placed.too_small == {0: 440 + 80}  # a.x, and a.y may have to pass through
    assert not place_greedily(Outline.of(model()), {0: 500, "disk": 50}).complete
