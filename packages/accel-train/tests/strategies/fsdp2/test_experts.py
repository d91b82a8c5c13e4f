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


class Refusing(Stacked):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise RuntimeError("only on an accelerator")


class WithDropout(Stacked):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        found = super().forward(hidden_states, top_k_index, top_k_weights)
        return nn.functional.dropout(found, 0.5, self.training)


class Listed(nn.ModuleList):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class Centred(nn.Linear):
    """Not of each token by itself."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def linears(count=4, kind=nn.Linear):
    return [kind(3, 3) for _ in range(count)]


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
        model_with(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 5)])),
        model_with(nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])),
        model_with(nn.ModuleList([nn.Linear(3, 3)] * 2)),
        model_with(nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])),
        nn.Linear(3, 3),
    ],
    ids=[
        "another name",
        "another call",
        "a parameter of all",
        "experts of other shapes",
        "experts of other classes",
        "one expert twice",
        "experts with buffers",
        "no layers",
    ],
)
def test_other_modules_are_not(model):
    assert find_experts(model) == []
    with pytest.raises(PrepareError, match=r"ep_size is 2, and .* has no experts that can be divided"):
        check_experts(model, [], 2)


def test_lists_are_found_with_the_module_that_calls_their_members():
    for members in (nn.ModuleList(linears()), nn.ModuleDict(dict(zip("abcd", linears(), strict=True)))):
        model = model_with(members)
        (found,) = find_experts(model)
        assert (found.count, found.members) == (4, tuple(members.children()))
        assert found.caller is model.layers[0]
        check_experts(model, [found], 2)
    (found,) = find_experts(model_with(Listed(linears())))
    assert found.caller is None


def test_a_module_that_looks_like_experts_is_named():
    with pytest.raises(PrepareError, match=r"'layers.0.experts' \(Whole\) is no such module"):
        check_experts(model_with(Whole()), [], 2)


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


def test_an_expert_of_a_list_computes_each_token_by_itself():
    model = model_with(nn.ModuleList(linears(kind=Centred)))
    with pytest.raises(
        PrepareError, match=r"An expert of layers\.0\.experts of Module returns something else"
    ):
        check_experts(model, find_experts(model), 2)


def test_experts_that_cannot_be_tried_are_refused_with_what_they_raise():
    model = model_with(Refusing())
    with pytest.raises(PrepareError, match=r"cannot be tried .*: RuntimeError: only on an accelerator"):
        check_experts(model, find_experts(model), 2)


def test_experts_are_tried_without_dropout():
    model = model_with(WithDropout())
    check_experts(model, find_experts(model), 2)
    assert model.layers[0].experts.training


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
