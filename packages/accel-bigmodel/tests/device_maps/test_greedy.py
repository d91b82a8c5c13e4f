from __future__ import annotations

import sys
from collections import OrderedDict

import pytest
from torch import nn

from accel_bigmodel import compute_module_sizes, fallback_allocate, find_tied_parameters, init_empty_weights
from accel_bigmodel.device_maps.greedy import assign_greedily, main_devices
from accel_bigmodel.device_maps.model_outline import Outline


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
    placed = assign_greedily(Outline.of(model()), {0: 100, "cpu": 10000, "disk": 10000})
    assert placed.complete
    assert placed.too_small == {0: 440 + 80}  # a.x, and a.y may have to pass through
    assert not assign_greedily(Outline.of(model()), {0: 500, "disk": 50}).complete


def test_a_part_that_is_tied_twice_counts_once():
    tree = named(a=named(p=nn.Linear(4, 4), q=nn.Linear(4, 4)), b=named(p=nn.Linear(4, 4), q=nn.Linear(4, 4)))
    tree.b.p.weight, tree.b.q.weight = tree.a.p.weight, tree.a.q.weight
    everything = 2 * 64 + 4 * 16
    placed = assign_greedily(Outline.of(tree, "Sequential"), {0: everything + 80, "disk": 1000})
    assert placed.device_map == {"a": 0, "b": 0}
    assert fallback(tree, everything, tied_parameters=find_tied_parameters(tree))[0] == "a"


def steps_of(function):
    """Calls of Python functions."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", ["alike", "tied", "ever smaller"])
def test_the_work_grows_with_the_model_and_no_faster(kind):
    def steps(blocks):
        sizes = range(4 + blocks, 4, -1) if kind == "ever smaller" else [4] * blocks
        with init_empty_weights():
            tree = nn.Sequential(*[nn.Sequential(nn.Linear(4, size), nn.Linear(4, 4)) for size in sizes])
        for block in list(tree)[::10] if kind == "tied" else ():
            block[0].weight = tree[0][0].weight
        outline = Outline.of(tree)
        budgets = {0: 50 * blocks, 1: 50 * blocks, "cpu": 30 * blocks, "disk": float("inf")}
        return steps_of(lambda: assign_greedily(outline, budgets))

    assert steps(160) < 3 * steps(80)
