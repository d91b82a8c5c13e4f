"""Traversal of a model's module tree."""

from __future__ import annotations

from torch import nn

from accel_state.module_trees import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, get_module_children_bottom_up


def test_modules_come_before_their_parents():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Linear(2, 2), shared)
    named = get_module_children_bottom_up(model, return_fqns=True)
    names = [name for name, _ in named]
    assert sorted(names) == sorted(name for name, _ in model.named_modules())
    assert names[-1] == ""
    for name in names:
        assert all(names.index(child) <= names.index(name) for child in names if child.startswith(name))
    assert get_module_children_bottom_up(model) == [module for _, module in named]


def test_modules_stand_in_the_order_in_which_they_are_registered():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())
    # what accelerate 1.15 gives
    expected = ["0", "1.0", "1.1", "1", "2", ""]
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == expected


def test_layers_that_can_be_upcast():
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    assert all(issubclass(layer, nn.Module) for layer in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
