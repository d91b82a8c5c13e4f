"""Names that are one parameter are found, and tied again."""

import pytest
import torch
from torch import nn

from accel_ckpt import (
    find_tied_parameters,
    retie_parameters,
)
from accel_ckpt.modules.ties import find_tied_tensors, parent_and_leaf


def tied(count=2):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for index in range(1, count):
        model[index].weight = model[0].weight
    return model


def test_find_tied_parameters():
    assert find_tied_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == []
    assert find_tied_parameters(tied(3)) == [["0.weight", "1.weight", "2.weight"]]
    model = tied()
    model[1].bias = model[2].bias
    assert find_tied_parameters(model) == [["0.weight", "1.weight"], ["1.bias", "2.bias"]]
    model[2].weight = nn.Parameter(model[0].weight.view(2, 2))
    assert len(find_tied_parameters(model)) == 2
    assert find_tied_parameters(model, recurse=False) == []


def test_retie_parameters():
    model = tied()
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    model[0].weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    retie_parameters(model, [["0.weight", "1.weight"], []])
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type == "cpu"
    with torch.device("meta"):
        left = tied()
    before = left[0].weight
    retie_parameters(left, [["0.weight", "1.weight"]])
    assert left[0].weight is before


def test_a_module_with_two_names_ties_all_of_its_parameters():
    shared = nn.Linear(2, 3)
    model = nn.ModuleDict({"b": shared, "a": shared, "c": nn.Linear(2, 3)})
    assert find_tied_parameters(model) == [["a.weight", "b.weight"], ["a.bias", "b.bias"]]


def test_a_tie_takes_the_first_name_that_has_values_and_changes_no_other_parameter():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    model[0].weight = None
    second, third, other = (model[index].weight for index in (1, 2, 3))
    retie_parameters(model, [["0.weight", "1.weight", "2.weight"]])
    assert model[0].weight is model[1].weight is model[2].weight is second
    assert second is not third
    assert model[3].weight is other


def test_a_name_that_the_module_does_not_register_stays_away():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    retie_parameters(model, [["0.weight", "1.weight"]])
    assert not hasattr(model[1], "weight")


def test_the_owner_of_a_tensor():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert parent_and_leaf(model, "0.0.weight") == (model[0][0], "weight")
    assert parent_and_leaf(model[0][0], "bias") == (model[0][0], "bias")
    with pytest.raises(AttributeError, match=r"Sequential has no attribute .1."):
        parent_and_leaf(model, "0.1.weight")


def with_buffers():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    model[2][0].running_mean = model[0].running_mean
    model[1].weight = model[0].weight
    return model


def test_tied_tensors_are_parameters_and_buffers():
    model = with_buffers()
    assert find_tied_parameters(model) == [["0.weight", "1.weight"]]
    assert find_tied_tensors(model) == [["0.weight", "1.weight"], ["0.running_mean", "2.0.running_mean"]]
    shared = nn.Sequential(model[1], model[2], model[1])
    assert ["0.running_var", "2.running_var"] in find_tied_tensors(shared)


def test_buffers_are_tied_again():
    model = with_buffers()
    ties = find_tied_tensors(model)
    model.to("meta")
    model[2][0].running_mean = torch.ones(2)
    retie_parameters(model, ties)
    assert model[0].running_mean is model[2][0].running_mean
    assert model[0].running_mean.tolist() == [1, 1]
    assert model[1].running_mean.is_meta
