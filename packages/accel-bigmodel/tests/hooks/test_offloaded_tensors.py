"""Tensors without values, and tensors that stand in for others."""

import copy
import gc

import torch
from torch import nn

from accel_bigmodel.hooks.offloaded_tensors import Borrowed, OffloadedTensor, tensor_locations, wrapped_like


def test_one_record_per_tensor_while_it_is_needed():
    weight = nn.Parameter(torch.ones(2))
    offloaded = OffloadedTensor.of(weight)
    assert OffloadedTensor.of(weight) is offloaded
    assert OffloadedTensor.of(offloaded.placeholder) is offloaded
    assert OffloadedTensor.of(nn.Parameter(torch.ones(2))) is not offloaded
    placeholder = offloaded.placeholder
    del offloaded
    gc.collect()
    assert OffloadedTensor.of(placeholder).placeholder is placeholder


def test_the_same_object_comes_back_with_the_values_given_the_first_time():
    weight = nn.Parameter(torch.ones(2))
    offloaded = OffloadedTensor.of(weight)
    offloaded.release()
    assert offloaded.restore(torch.full((2,), 2.0)) is weight
    assert weight.tolist() == [2, 2]
    assert offloaded.restore(torch.full((2,), 3.0)) is weight
    assert weight.tolist() == [2, 2]  # whoever shares it may have trained it since
    offloaded.release()
    assert offloaded.restore(torch.full((2,), 3.0)).tolist() == [3, 3]


def test_lending_makes_the_values_once_per_device_and_dtype():
    offloaded = OffloadedTensor.of(nn.Parameter(torch.ones(2)))
    made = []

    def make():
        made.append(torch.zeros(2))
        return made[-1]

    here, there = (torch.device("cpu"), torch.float32), (torch.device("meta"), torch.float32)
    assert offloaded.borrow(*here, make) is offloaded.borrow(*here, make) is made[0]
    assert offloaded.borrow(*there, make) is made[1]
    assert offloaded.borrow(torch.device("cpu"), torch.float16, make) is made[2]
    assert not offloaded.give_back(*here)
    assert offloaded.give_back(*here)
    assert offloaded.borrow(*here, make) is made[3]


def test_copies_bring_back_tensors_of_their_own():
    weight = nn.Parameter(torch.ones(2))
    other = copy.deepcopy(OffloadedTensor.of(weight))
    assert other.placeholder.is_meta
    assert OffloadedTensor.of(other.placeholder) is other
    found = other.restore(torch.zeros(2))
    assert found is not weight
    assert isinstance(found, nn.Parameter)
    assert found is other.restore(torch.zeros(2))


def test_places():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    module.register_parameter("none", None)
    assert [
        (location.name, location.is_parameter, location.is_saved)
        for location in tensor_locations(module, True)
    ] == [
        ("hidden", False, False),
        ("0.weight", True, True),
        ("0.bias", True, True),
        ("0.running_mean", False, True),
        ("0.running_var", False, True),
        ("0.num_batches_tracked", False, True),
        ("1.weight", True, True),
    ]
    assert [location.name for location in tensor_locations(module, False)] == ["hidden"]


def test_what_forward_puts_in_place_of_a_lent_tensor_stays():
    module, borrowed, ended = nn.Linear(1, 1), Borrowed(), []
    weight, bias = tensor_locations(module, False)
    own = module.bias
    borrowed.begin()
    for at in (weight, bias):
        borrowed.put(
            at,
            wrapped_like(at.tensor, torch.zeros_like(at.tensor)),
            lambda: ended.append(1),
        )
    module.weight = new = nn.Parameter(torch.ones(1, 1))
    borrowed.end()
    borrowed.end()
    assert module.weight is new
    assert module.bias is own
    assert ended == [1, 1]
