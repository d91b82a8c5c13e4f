"""What a script changes after an engine was made is refused. Needs no DeepSpeed: an engine is a module with a stage."""

import pytest
import torch
from torch import nn

from accel_train.errors import AccumulationError, PrepareError
from accel_train.strategies.deepspeed.changes import NewParameterGuard


class Engine(nn.Module):
    def __init__(self, module, stage):
        super().__init__()
        self.module, self.stage = module, stage

    def zero_optimization_stage(self):
        return self.stage

    def forward(self, x):
        return self.module(x)


def made(stage=2):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, stage)
    return model, engine, optimizer, NewParameterGuard(engine, model, optimizer)


X = torch.ones(1, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_changed(stage):
    _, engine, _, watch = made(stage)
    engine(X).sum().backward()
    watch.check()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_added_is_refused_before_it_is_computed(stage):
    model, engine, _, watch = made(stage)
    model.append(nn.Linear(2, 2))
    with pytest.raises(PrepareError, match=r"'2\.weight' was added to Sequential after prepare\(\)"):
        engine(X)
    with pytest.raises(PrepareError, match=r"'2\.weight' was added"):
        watch.check()
    with torch.no_grad():
        if stage == 3:  # the engine gathers only what it knows
            with pytest.raises(PrepareError, match="was added"):
                engine(X)
        else:
            engine(X)


def test_what_is_replaced_is_refused():
    model, engine, _, _ = made()
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(
        PrepareError, match=r"'0\.weight' was replaced in Sequential .* would keep its values"
    ):
        engine(X)


@pytest.mark.parametrize(
    ("name", "trains", "text"),
    [
        (
            "0.weight",
            False,
            r"'0\.weight' of Sequential was frozen after prepare\(\).*momentum and weight decay",
        ),
        ("1.bias", True, r"'1\.bias' of Sequential was frozen when the model was prepared, and unfrozen"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_or_unfrozen(stage, name, trains, text):
    model, engine, _, watch = made(stage)
    model.get_parameter(name).requires_grad_(trains)
    with pytest.raises(PrepareError, match=text) as refused:
        watch.check()
    assert ("only zero_stage=1" in str(refused.value)) is (stage >= 2 and not trains)
    if stage >= 2:
        with pytest.raises(PrepareError, match=text):
            engine(X)
    else:
        engine(X)  # another model may be trained through it
    with torch.no_grad():
        engine(X)
    model.get_parameter(name).requires_grad_(not trains)
    watch.check()


def test_a_group_that_is_added_to_the_optimizer():
    _, engine, optimizer, watch = made()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    engine(X)
    with pytest.raises(PrepareError, match=r"SGD had 1 groups of parameters when it was prepared, and has 2"):
        watch.check()


def test_an_engine_that_only_evaluates():
    model = nn.Linear(2, 2)
    engine = Engine(model, 3)
    watch = NewParameterGuard(engine, model)
    with torch.no_grad():
        engine(X)
    watch.check()


@pytest.mark.parametrize("stage", [2, 3])
def test_stage_3_takes_one_backward_of_several_forwards(stage):
    _, engine, _, watch = made(stage)
    for _ in range(2):
        first, second = engine(X), engine(X)
        with torch.no_grad():
            engine(X)
        watch.check()  # one loss of both
        if stage == 3:
            with pytest.raises(AccumulationError, match=r"called 2 times after 2 forwards of Sequential"):
                watch.check()
        else:
            watch.check()
        assert first.requires_grad
        assert second.requires_grad


def test_stage_3_takes_a_backward_after_each_forward_and_several_of_one():
    _, engine, _, watch = made(3)
    for backwards in (1, 1, 2, 3):
        engine(X)
        for _ in range(backwards):
            watch.check()
