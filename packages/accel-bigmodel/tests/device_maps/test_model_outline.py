from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from accel_bigmodel import DeviceMapError, compute_module_sizes, get_module_leaves, get_module_size_with_ties
from accel_bigmodel.device_maps.model_outline import Outline, is_within


def test_get_module_leaves():
    assert get_module_leaves({"": 9, "a": 3, "a.x": 2, "a.y": 1, "b": 6, "ab": 1}) == [
        "a.x",
        "a.y",
        "b",
        "ab",
    ]
    assert get_module_leaves({"": 0}) == []


def test_get_module_size_with_ties():
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    model.b[1].weight = model.a.weight
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    assert get_module_size_with_ties([], 80, sizes, parts) == (80, [], [])
    assert get_module_size_with_ties(["b.1.weight"], 80, sizes, parts[1:]) == (80 + 96, ["b"], [model.b])
    # a part counts once, however many of its parameters are tied
    model.b[1].bias = model.a.bias
    sizes = compute_module_sizes(model)
    both = get_module_size_with_ties(["b.1.weight", "b.1.bias"], 80, sizes, parts[1:])
    assert both == (80 + 80, ["b", "b"], [model.b, model.b])
    # one that is a part itself, and one that was placed before
    split = [("b.1.weight", model.b[1].weight)]
    assert get_module_size_with_ties(["b.1.weight"], 80, sizes, split)[:2] == (80, ["b.1.weight"])
    assert get_module_size_with_ties(["b.1.weight"], 80, sizes, []) == (80, [], [])


def test_is_within():
    assert is_within("a.b", "a")
    assert is_within("a", "a")
    assert is_within("a", "")
    assert not is_within("ab", "a")


def test_layers_are_in_order_and_whole_where_asked():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.first = nn.Linear(1, 1)
            self.register_buffer("table", torch.ones(1))
            self.nothing = None
            self.register_parameter("none", None)

    model = nn.Sequential(Block(), nn.ReLU())
    assert [name for name, _ in Outline.of(model).layers()] == ["0.scale", "0.first", "0.table", "1"]
    assert [name for name, _ in Outline.of(model, "Block").layers()] == ["0", "1"]
    assert [name for name, _ in Outline.of(nn.Linear(1, 1)).layers()] == ["weight", "bias"]


@pytest.mark.parametrize("classes", [[nn.Linear], nn.Linear, ["Block", None], 5])
def test_classes_are_given_by_name(classes):
    with pytest.raises(DeviceMapError, match=r"no_split_module_classes contains .*; give names of classes"):
        Outline.of(nn.Linear(1, 1), classes)
