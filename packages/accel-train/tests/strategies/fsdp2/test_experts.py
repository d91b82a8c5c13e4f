"""Which modules hold experts, and which of them can be divided. Training is in tests-integration/test_experts.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_ckpt.modules.experts import find_experts
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.experts import check_experts


class Stacked(nn.Module):
    def __init__(self, count=4, features=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, features, features))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = torch.einsum("tkij,tj->tki", self.weight[top_k_index], hidden_states)
        return (chosen * top_k_weights[..., None]).sum(1)


class Renormalised(Stacked):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights / top_k_weights.sum(1, keepdim=True))


class Whole(Stacked):
    def forward(self, hidden_states):
        return hidden_states


class WithABias(Stacked):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))  # of all experts together


class Listed(nn.ModuleList):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def model_with(experts, name="experts"):
    layer = nn.Module()
    layer.router = nn.Linear(3, 4)
    layer.add_module(name, experts)
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    return model


def test_stacked_experts_are_found_by_name_call_and_shape():
    model = model_with(Stacked())
    (found,) = find_experts(model)
    assert (found.name, found.module, found.count) == ("layers.0.experts", model.layers[0].experts, 4)
    check_experts(model, [found], 2)


@pytest.mark.parametrize(
    "model",
    [
        model_with(Stacked(), name="mlp"),
        model_with(Whole()),
        model_with(WithABias()),
        model_with(Listed([nn.Linear(3, 3), nn.Linear(3, 3)])),
        nn.Linear(3, 3),
    ],
    ids=["another name", "another call", "a parameter of all", "a list", "no layers"],
)
def test_other_modules_are_not(model):
    assert find_experts(model) == []
    with pytest.raises(PrepareError, match=r"ep_size is 2, and .* has no experts that can be divided"):
        check_experts(model, [], 2)


def test_a_module_that_looks_like_experts_is_named():
    with pytest.raises(PrepareError, match=r"'layers.0.experts' \(Listed\) is no such module"):
        check_experts(model_with(Listed([nn.Linear(3, 3)])), [], 2)


def test_a_number_that_cannot_be_divided_is_refused():
    model = model_with(Stacked(6))
    with pytest.raises(
        PrepareError,
        match=r"layers\.0\.experts of Module has 6 experts, which cannot be divided among ep_size=4",
    ):
        check_experts(model, find_experts(model), 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_weighted_sums_are_divided(dtype):
    summed, normalised = model_with(Stacked()).to(dtype), model_with(Renormalised()).to(dtype)
    check_experts(summed, find_experts(summed), 2)
    with pytest.raises(PrepareError, match="is not the sum of weight x expert"):
        check_experts(normalised, find_experts(normalised), 2)


def test_without_values_a_sum_is_not_computed():
    with torch.device("meta"):
        model = model_with(Renormalised())
    check_experts(model, find_experts(model), 2)


def test_a_parameter_that_is_used_elsewhere_is_refused():
    model = model_with(Stacked())
    model.tied = nn.Module()
    model.tied.weight = model.layers[0].experts.weight
    with pytest.raises(PrepareError, match=r"shares the parameter 'tied\.weight'"):
        check_experts(model, find_experts(model), 2)
