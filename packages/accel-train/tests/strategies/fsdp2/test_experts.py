"""Which modules hold experts, and which of them can be divided. Training is in tests-integration/test_experts.py."""

from __future__ import annotations

import contextlib

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


class PerExpert(nn.Module):
    """One matrix of each expert; what `form` names is of each expert too, or of all tokens of an expert."""

    ACTS = (torch.tanh, torch.sigmoid, torch.relu, torch.sin)

    def __init__(self, form="plain", count=4, features=3):
        super().__init__()
        self.form = form
        self.num_experts = self.number = count
        self.weight = nn.Parameter(torch.randn(count, features, features))
        self.gate = nn.Parameter(torch.randn(count, 1))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, -1.0, 0.5]))
        self.register_buffer("ones", torch.ones(count, features))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.constant = torch.tensor([1.0, 2.0, -1.0, 0.5])
        self.slices = [self.weight.detach()[expert] for expert in range(count)]
        self.acts = nn.ModuleList([nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.Identity()])
        self.inner = nn.Module()
        self.inner.register_buffer("shift", torch.randn(count, features))
        self.inner.number = count
        self.norm = nn.BatchNorm1d(features, affine=False, track_running_stats=True)
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        count = {"another number": self.number, "a nested number": self.inner.number}
        limit = int(1.25 * top_k_index.numel() / self.num_experts) or 1
        for expert in range(count.get(self.form, self.num_experts)):
            token, place = torch.where(top_k_index == expert)
            if self.form == "a limit" or (self.form == "a limit in training" and self.training):
                token, place = token[:limit], place[:limit]
            if token.numel() or self.form.endswith("number"):
                out = self.expert(hidden_states[token], expert)
                result.index_add_(0, token, out * top_k_weights[token, place, None])
        return result

    def expert(self, x, number):
        out = torch.tanh(x @ self.weight[number])
        if self.form == "a buffer":
            out = out * self.scale[number].to(x)
        elif self.form == "a buffer in training" and self.training:
            out = out * self.scale[number]
        elif self.form == "a buffer of ones":
            out = out * self.ones[number]
        elif self.form == "a tensor":
            out = out * self.constant[number]
        elif self.form == "slices":
            out = x @ self.slices[number]
        elif self.form == "functions":
            out = self.ACTS[number](out)
        elif self.form == "modules":
            out = self.acts[number](out)
        elif self.form == "a nested buffer":
            out = out + self.inner.shift[number]
        elif self.form == "a gate of each":
            out = out * self.gate[number]
        elif self.form == "a gate of all":
            out = out * self.gate.softmax(0)[number]
        elif self.form == "a deviation" and self.training and len(x) > 1:
            out = out / out.std(0).clamp(min=1e-3)
        elif self.form == "a norm in training":
            self.calls += 1
            self.seen.append(number)
            out = self.norm(out)
        elif self.form == "dropout, and a mean in training":
            out = self.dropout(out - out.mean(0) if self.training else out)
        return out


class ShiftedInTraining(nn.Linear):
    """Not of each token by itself in training."""

    def forward(self, x):
        return super().forward(x - x.mean(0) if self.training else x)


class Limited(nn.Linear):
    """Computes eight tokens at most."""

    def forward(self, x):
        return torch.cat([super().forward(x[:8]), x[8:]])


class SometimesNothing(Stacked):
    """Drops whole calls in training."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        found = super().forward(hidden_states, top_k_index, top_k_weights)
        return found * 0 if self.training and torch.rand(()) < 0.1 else found


class NeedsGradients(Stacked):
    """A loss of its own in training."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        found = super().forward(hidden_states, top_k_index, top_k_weights)
        if self.training:
            torch.autograd.grad(found.sum(), self.weight)
        return found


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


def test_experts_of_a_list_may_return_another_size():
    model = model_with(nn.ModuleList([nn.Linear(3, 5) for _ in range(4)]))
    check_experts(model, find_experts(model), 2)


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


@pytest.mark.parametrize("kind", [ShiftedInTraining, Limited])
def test_an_expert_of_a_list_computes_many_tokens_in_training(kind):
    model = model_with(nn.ModuleList(linears(kind=kind)))
    with pytest.raises(PrepareError, match="returns something else for a token if it computes other tokens"):
        check_experts(model, find_experts(model), 2)


@pytest.mark.parametrize(
    "form",
    [
        "a buffer",
        "a buffer in training",
        "a buffer of ones",
        "a tensor",
        "slices",
        "functions",
        "modules",
        "a nested buffer",
        "a gate of all",
        "another number",
        "a nested number",
    ],
)
def test_what_has_an_entry_for_each_expert_is_a_parameter(form):
    model = model_with(PerExpert(form))
    (found,) = find_experts(model)
    with pytest.raises(
        PrepareError,
        match=r"layers\.0\.experts of Module returns something else on a rank that has 2 of its 4",
    ):
        check_experts(model, [found], 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_in_bf16_are_no_parameters_either(ranks):
    model = model_with(PerExpert("a buffer")).to(torch.bfloat16)
    with pytest.raises(PrepareError, match=rf"on a rank that has {4 // ranks} of its 4 experts"):
        check_experts(model, find_experts(model), ranks)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("a limit", "evaluation"),
        ("a limit in training", "training"),
        ("a deviation", "training"),
        ("a norm in training", "training"),
        ("dropout, and a mean in training", "training"),
    ],
)
def test_an_expert_computes_each_token_by_itself(form, mode):
    model = model_with(PerExpert(form))
    with pytest.raises(
        PrepareError, match=rf"(?s)An expert of .* if it computes other tokens with it.* in {mode} mode"
    ):
        check_experts(model, find_experts(model), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["plain", "a gate of each"])
def test_experts_with_parameters_only_are_divided(form, ranks, dtype):
    model = model_with(PerExpert(form)).to(dtype)
    check_experts(model, find_experts(model), ranks)


def test_experts_of_two_dtypes_are_compared_as_the_coarser_one():
    torch.manual_seed(0)
    model = model_with(PerExpert("a gate of each", features=8))
    experts = model.layers[0].experts
    experts.gate.data = experts.gate.data.to(torch.bfloat16)
    check_experts(model, find_experts(model), 2)


@pytest.mark.parametrize("kind", [SometimesNothing, NeedsGradients])
def test_experts_are_not_tried_in_training_if_they_draw_or_fail_there(kind):
    for seed in range(10):
        torch.manual_seed(seed)
        model = model_with(kind())
        check_experts(model, find_experts(model), 2)


@pytest.mark.parametrize("form", ["plain", "a norm in training", "dropout, and a mean in training"])
def test_a_trial_leaves_everything_as_it_was(form):
    experts = PerExpert(form)
    model = model_with(experts)
    experts.acts.eval()
    modes = [module.training for module in model.modules()]
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    random_state = torch.get_rng_state()
    with contextlib.suppress(PrepareError):
        check_experts(model, find_experts(model), 2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert experts.seen == []
    assert experts.num_experts == 4
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
    for module, kept in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == kept.keys()
        assert all(vars(module)[name] is value for name, value in kept.items())


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
