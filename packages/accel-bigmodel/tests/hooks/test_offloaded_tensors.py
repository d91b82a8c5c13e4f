"""Tensors without values, and tensors that stand in for others."""

import copy
import gc

import torch
from torch import nn

from accel_bigmodel.hooks.offloaded_tensors import Loans, park, places_in, stand_in


def test_one_parked_tensor_per_tensor_while_it_is_needed():
    weight = nn.Parameter(torch.ones(2))
    parked = park(weight)
    assert park(weight) is parked
    assert park(parked.placeholder) is parked
    assert park(nn.Parameter(torch.ones(2))) is not parked
    placeholder = parked.placeholder
    del parked
    gc.collect()
    assert park(placeholder).placeholder is placeholder


def test_the_same_object_comes_back_with_the_values_given_the_first_time():
    weight = nn.Parameter(torch.ones(2))
    parked = park(weight)
    parked.leave()
    assert parked.bring_back(torch.full((2,), 2.0)) is weight
    assert weight.tolist() == [2, 2]
    assert parked.bring_back(torch.full((2,), 3.0)) is weight
    assert weight.tolist() == [2, 2]  # whoever shares it may have trained it since
    parked.leave()
    assert parked.bring_back(torch.full((2,), 3.0)).tolist() == [3, 3]


def test_lending_makes_the_values_once_per_device_and_dtype():
    parked = park(nn.Parameter(torch.ones(2)))
    made = []

    def make():
        made.append(torch.zeros(2))
        return made[-1]

    here, there = (torch.device("cpu"), torch.float32), (torch.device("meta"), torch.float32)
    assert parked.lend(*here, make) is parked.lend(*here, make) is made[0]
    assert parked.lend(*there, make) is made[1]
    assert parked.lend(torch.device("cpu"), torch.float16, make) is made[2]
    assert not parked.take_back(*here)
    assert parked.take_back(*here)
    assert parked.lend(*here, make) is made[3]


def test_copies_bring_back_tensors_of_their_own():
    weight = nn.Parameter(torch.ones(2))
    other = copy.deepcopy(park(weight))
    assert other.placeholder.is_meta
    assert park(other.placeholder) is other
    found = other.bring_back(torch.zeros(2))
    assert found is not weight
    assert isinstance(found, nn.Parameter)
    assert found is other.bring_back(torch.zeros(2))


def test_places():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    module.register_parameter("none", None)
    assert [(place.name, place.is_parameter, place.is_saved) for place in places_in(module, True)] == [
        ("hidden", False, False),
        ("0.weight", True, True),
        ("0.bias", True, True),
        ("0.running_mean", False, True),
        ("0.running_var", False, True),
        ("0.num_batches_tracked", False, True),
        ("1.weight", True, True),
    ]
    assert [place.name for place in places_in(module, False)] == ["hidden"]


def test_what_forward_puts_in_place_of_a_lent_tensor_stays():
    module, loans, ended = nn.Linear(1, 1), Loans(), []
    weight, bias = places_in(module, False)
    own = module.bias
    loans.begin()
    for place in (weight, bias):
        loans.put(place, stand_in(place.tensor, torch.zeros_like(place.tensor)), lambda: ended.append(1))
    module.weight = new = nn.Parameter(torch.ones(1, 1))
    loans.end()
    loans.end()
    assert module.weight is new
    assert module.bias is own
    assert ended == [1, 1]
