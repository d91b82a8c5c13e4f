"""Groups of the script's optimizer, and gradients between backward and step. Needs no Megatron-core."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_train.errors import AccumulationError, IncompatibleOptionsError, OptionError, PrepareError
from accel_train.strategies.computed_loss import ComputedLosses
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.gradients import MegatronGradients, regrouped
from accel_train.strategies.megatron.layout import Dims, Heads, WholeTensor

DIMS = Dims(0, 1, 7, 2, 1, 3)  # two groups of one query, a key and a value of 3 elements each


class Script(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 6, bias=False) for _ in range(3))
        self.out = nn.Linear(6, 4)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(18, 4))
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4))


def built(architecture="any"):
    rules = {
        "qkv": Heads(("q.weight", "k.weight", "v.weight")),
        "weight": WholeTensor("out.weight"),
        "bias": WholeTensor("out.bias"),
    }
    return Built(Stage(), None, architecture, rules, DIMS)


def fused(model):
    return [model.q.weight, model.k.weight, model.v.weight]


def test_parameters_follow_the_groups_of_their_values():
    model, stage = Script(), built()
    optimizer = torch.optim.SGD(
        [{"params": [model.out.weight]}, {"params": [*fused(model), model.out.bias]}], lr=0.1
    )
    first, second = regrouped(stage, model, optimizer)
    assert [id(p) for p in first] == [id(stage.module.weight)]
    assert {id(p) for p in second} == {id(stage.module.qkv), id(stage.module.bias)}


def test_what_is_frozen_or_in_no_group_is_frozen():
    model, stage = Script(), built()
    model.out.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*fused(model), model.out.weight], lr=0.1)
    [found] = regrouped(stage, model, optimizer)
    assert [id(p) for p in found] == [id(stage.module.qkv)]
    assert not stage.module.weight.requires_grad, "the script does not train it"
    assert not stage.module.bias.requires_grad, "no group has it"


def test_one_tensor_in_several_groups_is_refused():
    model = Script()
    groups = [{"params": [model.q.weight]}, {"params": [model.k.weight]}]
    with pytest.raises(
        IncompatibleOptionsError,
        match=r"q\.weight in group 0, k\.weight in group 1, v\.weight in no group \(or frozen\) in one tensor",
    ):
        regrouped(built(), model, torch.optim.SGD(groups, lr=0.1))


def test_an_optimizer_that_has_stepped_is_refused():
    model = Script()
    optimizer = torch.optim.Adam(model.parameters())
    model.out.bias.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(PrepareError, match=r"Adam has stepped already.*load_state\(\)"):
        regrouped(built(), model, optimizer)


def test_a_model_of_the_scripts_own_has_one_group():
    model, stage = Script(), built(architecture=None)
    stage.module.bias.requires_grad_(False)
    [found] = regrouped(stage, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {id(p) for p in found} == {id(stage.module.qkv), id(stage.module.weight)}
    with pytest.raises(IncompatibleOptionsError, match=r"SGD has 2 groups .*Use one group"):
        regrouped(stage, model, torch.optim.SGD([{"params": [p]} for p in fused(model)[:2]], lr=0.1))


class Chunk(nn.Module):
    """Holds gradients as Megatron's data parallelism does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.weight.main_grad = torch.tensor([3.0, -4.0, 0.0, 12.0])  # of norm 13

    def scale_gradients(self, factor):
        self.weight.main_grad *= factor

    def zero_grad_buffer(self):
        self.weight.main_grad.zero_()


def gradients(chunk):
    optimizer = SimpleNamespace(
        prepare_grads=lambda: False,
        get_grad_norm=lambda: chunk.weight.main_grad.norm().item(),
        step=lambda: (True, None, None),
        zero_grad=lambda set_to_none: None,
    )
    return MegatronGradients(chunk, optimizer, SimpleNamespace(), ComputedLosses())


def test_a_window_begins_with_its_first_backward():
    found = gradients(Chunk())
    assert [found.before_backward(), found.before_backward()] == [True, False]
    found.drop()
    assert found.before_backward() is True


@pytest.mark.parametrize(
    ("bound", "expected"), [(6.5, [1.5, -2.0, 0.0, 6.0]), (20.0, [3.0, -4.0, 0.0, 12.0])]
)
def test_clipping_is_that_of_torch(bound, expected):
    chunk = Chunk()
    norm = gradients(chunk).clip(bound, 2)
    assert norm.item() == 13
    torch.testing.assert_close(chunk.weight.main_grad, torch.tensor(expected))


def test_other_norms_are_refused_before_anything_is_scaled():
    chunk = Chunk()
    with pytest.raises(OptionError, match=r"norm_type is 1\.0"):
        gradients(chunk).clip(1.0, 1.0)
    assert chunk.weight.main_grad.tolist() == [3, -4, 0, 12]


def test_elements_are_limited_and_dropped_by_the_step():
    chunk = Chunk()
    found = gradients(chunk)
    found.limit(3.5)
    assert chunk.weight.main_grad.tolist() == [3, -3.5, 0, 3.5]
    assert found.step() is True
    assert chunk.weight.main_grad.tolist() == [0] * 4


def test_a_backward_after_the_reduction_is_refused(monkeypatch):
    """Megatron's own reduction is all that is stood in for."""
    reduced = []
    module = SimpleNamespace(finalize_model_grads=reduced.append)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core.distributed", module)
    chunk = Chunk()
    found = gradients(chunk)
    found.before_backward()
    found.complete()
    found.complete()
    assert reduced == [[chunk]], "once"
    with pytest.raises(AccumulationError, match=r"follows the use of reduced gradients.*zero_grad\(\)"):
        found.before_backward()
    found.drop()
    assert found.before_backward() is True
