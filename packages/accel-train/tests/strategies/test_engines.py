"""What DeepSpeed's and Megatron's strategies have in common, with an engine that only notes what is asked of it."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_state.errors import NotAvailableError
from accel_train.errors import ArgumentTypeError
from accel_train.mesh import Mesh
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.strategies.base import StrategyOptions
from accel_train.strategies.engines import EngineStrategy, check_groups
from accel_train.strategies.megatron.strategy import MegatronStrategy


@dataclass
class Gradients:
    waiting: bool = False
    stepped: bool = True
    calls: list = field(default_factory=list)

    def step(self):
        self.calls.append("step")
        return self.stepped

    def drop(self):
        self.calls.append("drop")


@dataclass
class Made:
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    gradients: Gradients | None = None
    groups: list | None = None


class Engine(EngineStrategy[Made]):
    stepper = "the noting engine"


def trained(value=1.0):
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.fixture
def strategy():
    return Engine(StrategyOptions(torch.device("cpu"), Mesh.of_world(1, 0), Precision(PrecisionOptions())))


def test_models_and_optimizers_find_their_engines(strategy):
    (first, one), (second, two) = trained(), trained()
    strategy.made += [Made(first, one, Gradients()), Made(second, two, Gradients())]
    assert strategy.of_model(second) is strategy.made[1]
    assert strategy.of_optimizer(one) is strategy.made[0]
    assert strategy.of_model(nn.Linear(2, 1)) is None
    assert strategy.of_optimizer(trained()[1]) is None


@pytest.mark.parametrize("stepped", [True, False])
def test_the_engine_steps_and_drops(strategy, stepped):
    model, optimizer = trained()
    before = model.weight.detach().clone()
    gradients = Gradients(stepped=stepped)
    strategy.made.append(Made(model, optimizer, gradients))
    assert strategy.step(optimizer) == (stepped, None)
    strategy.zero_grad(optimizer)
    assert gradients.calls == ["step", "drop"]
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None


def test_a_closure_is_refused_before_anything_happens(strategy):
    model, optimizer = trained()
    strategy.made.append(Made(model, optimizer, Gradients()))
    with pytest.raises(ArgumentTypeError, match="not known to the noting engine"):
        strategy.step(optimizer, lambda: 0.0)
    assert strategy.made[0].gradients.calls == []


def test_other_optimizers_step_as_without_an_engine(strategy):
    model, optimizer = trained()
    before = model.weight.detach().clone()
    strategy.made.append(Made(*trained(), Gradients()))
    assert strategy.step(optimizer)[0]
    assert torch.equal(model.weight, before - 1)
    strategy.zero_grad(optimizer)
    assert model.weight.grad is None
    assert strategy.states.parameter_groups(optimizer) == [list(model.parameters())]


def test_groups_are_those_of_the_script(strategy):
    model, optimizer = trained()
    groups = [[model.weight], [model.bias]]
    strategy.made.append(Made(model, optimizer, Gradients(), groups))
    assert strategy.states.parameter_groups(optimizer) is groups


def test_gradients_wait_if_those_of_any_engine_do(strategy):
    assert not strategy.states.gradients.wait_in_engine
    strategy.made += [Made(nn.Linear(1, 1)), Made(*trained(), Gradients())]
    assert not strategy.states.gradients.wait_in_engine
    strategy.made[1].gradients.waiting = True
    assert strategy.states.gradients.wait_in_engine


def saved(*groups):
    return {"param_groups": [{"params": list(group)} for group in groups]}


def test_order_of_groups_and_empty_groups_do_not_matter():
    check_groups([["a", "b"], [], ["c"]], saved(["c"], ["b", "a"]))
    check_groups([["a"]], saved([], ["a"]))


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        ([["a", "b"]], [["a"]], "it lacks b"),
        ([["a"]], [["a", "b"]], "b are in none of the groups here"),
        ([["a"], ["b"]], [["a", "b"]], "its parameters are grouped otherwise"),
    ],
)
def test_a_saved_optimizer_of_other_groups_is_refused(here, there, says):
    with pytest.raises(StateMismatchError, match=says):
        check_groups(here, saved(*there))


def test_states_do_not_move_to_host_memory(strategy):
    model, optimizer = trained()
    strategy.made.append(Made(model, optimizer, Gradients()))
    with pytest.raises(NotAvailableError, match=r"the noting engine keeps .*save_state\(\)"):
        strategy.check_offload([model], [optimizer], ["parameters"])
    assert MegatronStrategy.check_offload is EngineStrategy.check_offload
