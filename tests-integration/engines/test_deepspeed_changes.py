"""What a script changes in a model after DeepSpeed's engine was made of it, against plain PyTorch on one process."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

STAGES = [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
WIDTH = 6


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * self.scale if hasattr(self, "scale") else out


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Scaled(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model[0].requires_grad_(False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def data() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


class Plain:
    """The script in plain PyTorch, on one process with the samples of all ranks."""

    def __init__(self) -> None:
        self.model = make()
        self.optimizer = optimizer_of(self.model)

    def steps(self, count: int = 2) -> None:
        for _ in range(count):
            self.model(data()).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def start_again(self) -> None:
        self.optimizer = optimizer_of(self.model)


class Ranks:
    """The same on ranks."""

    def __init__(self, stage: int) -> None:
        from accel_train import Accelerator, DeepSpeedPlugin

        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        self.model = make()
        self.engine, self.optimizer = self.accelerator.prepare(self.model, optimizer_of(self.model))
        self.x = data().chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def steps(self, count: int = 2) -> None:
        for _ in range(count):
            self.accelerator.backward(self.engine(self.x).square().mean())
            self.accelerator.clip_grad_norm_(self.engine.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def start_again(self) -> None:
        """As the errors say."""
        self.model = self.accelerator.unwrap_model(self.engine)
        self.accelerator.free_memory()
        self.engine, self.optimizer = self.accelerator.prepare(self.model, optimizer_of(self.model))

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.engine).items()}


def add_module(model):
    torch.manual_seed(2)
    model.append(nn.Linear(2, 2))


def add_parameter(model):
    model[2].register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))


def replace(model):
    torch.manual_seed(2)
    model[3] = nn.Linear(WIDTH, 2)


def freeze(model):
    model[3].requires_grad_(False)


def unfreeze(model):
    model[0].weight.requires_grad_(True)


CHANGES = {
    add_module: r"'4\.weight' was added to Sequential after prepare\(\), .* does not know it",
    add_parameter: r"'2\.scale' was added to Sequential",
    replace: r"'3\.weight' was replaced in Sequential",
    freeze: r"'3\.weight' of Sequential was frozen after prepare\(\), .* momentum and weight decay",
    unfreeze: r"'0\.weight' of Sequential was frozen when the model was prepared, and unfrozen after",
}
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def refuse(stage, change):
    from accel_train.errors import PrepareError

    run = Ranks(stage)
    run.steps()
    before = run.weights()
    change(run.model)
    with pytest.raises(PrepareError) as caught:
        run.steps()
    with pytest.raises(PrepareError) as again:
        run.steps()
    assert str(again.value) == str(caught.value)
    if change in (freeze, unfreeze):
        model = run.model
        (model[3] if change is freeze else model[0]).requires_grad_(change is freeze)
        for name, value in run.weights().items():
            assert torch.equal(value, before[name]), "nothing was stepped"
        run.steps()
    return str(caught.value), run.weights() if change in (freeze, unfreeze) else {}


@changes
@pytest.mark.parametrize("stage", STAGES)
def test_t39_a_changed_model_is_refused_on_all_ranks(stage, change):
    """One that is changed back trains on."""
    plain = Plain()
    plain.steps(4)
    (first, weights), (second, _) = worlds.run(refuse, 2, stage, change)
    assert first == second
    assert re.search(CHANGES[change], first), first
    assert "accelerator.free_memory()" in first
    for name, value in weights.items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


def change_and_start_again(stage, change):
    run = Ranks(stage)
    run.steps()
    change(run.model)
    run.start_again()
    run.steps()
    return run.weights()


@changes
@pytest.mark.parametrize("stage", STAGES)
def test_t39_what_the_error_says_trains_a_changed_model(stage, change):
    plain = Plain()
    plain.steps()
    change(plain.model)
    plain.start_again()
    plain.steps()
    for weights in worlds.run(change_and_start_again, 2, stage, change):
        assert weights.keys() == plain.model.state_dict().keys()
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def remove(stage):
    run = Ranks(stage)
    run.steps()
    run.model[3].bias = None
    run.steps()
    return run.weights()


@pytest.mark.parametrize("stage", STAGES)
def test_the_rest_of_a_model_trains_on_when_a_parameter_is_removed(stage):
    plain = Plain()
    plain.steps()
    plain.model[3].bias = None
    plain.steps()
    for weights in worlds.run(remove, 2, stage):
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def add_group(stage):
    run = Ranks(stage)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    run.steps()


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_that_is_added_to_the_optimizer_is_refused(stage):
    with pytest.raises(worlds.RankError, match=r"PrepareError: AdamW had 1 groups .*, and has 2; DeepSpeed"):
        worlds.run(add_group, 2, stage)


def evaluate(stage):
    """Parameters that are added to a model may be used; only stage 3 has to gather what it knows."""
    run = Ranks(stage)
    add_module(run.model)
    with torch.no_grad():
        return run.engine(run.x)


def test_a_changed_model_may_be_evaluated():
    model = make()
    add_module(model)
    for rank, found in enumerate(worlds.run(evaluate, 2, 2)):
        torch.testing.assert_close(found, model(data()).detach().chunk(2)[rank])
    with pytest.raises(worlds.RankError, match=r"PrepareError: The parameter '4\.weight' was added"):
        worlds.run(evaluate, 2, 3)


def through_another(stage):
    """A generator's step through a discriminator that is frozen meanwhile."""
    from accel_train import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    first, second = make(), nn.Linear(2, 1)
    one, other = optimizer_of(first), torch.optim.SGD(second.parameters(), lr=0.1)
    engine, judge, one, other = accelerator.prepare(first, second, one, other)
    for _ in range(2):
        second.requires_grad_(False)
        accelerator.backward(judge(engine(data())).square().mean())
        one.step()
        one.zero_grad()
        second.requires_grad_(True)
        accelerator.backward(judge(engine(data()).detach()).square().mean())
        other.step()
        other.zero_grad()
    return [dict(accelerator.get_state_dict(model)) for model in (engine, judge)]


def test_a_model_is_frozen_while_another_is_trained_through_it():
    torch.manual_seed(0)
    first = make()
    second = nn.Linear(2, 1)
    one, other = optimizer_of(first), torch.optim.SGD(second.parameters(), lr=0.1)
    for _ in range(2):
        second.requires_grad_(False)
        second(first(data())).square().mean().backward()
        one.step()
        one.zero_grad()
        second.requires_grad_(True)
        second(first(data()).detach()).square().mean().backward()
        other.step()
        other.zero_grad()
    for found in worlds.run(through_another, 2, 1):
        for weights, model in zip(found, (first, second), strict=True):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_hooks_of_higher_stages_would_take_the_backward_for_one_of_the_frozen_model(stage):
    """Driven by hand, the engine raises an IndexError in stage 2, and trains the frozen model wrongly in stage 3."""
    with pytest.raises(
        worlds.RankError, match=r"PrepareError: .*'weight' of Linear was frozen.*zero_stage=1"
    ):
        worlds.run(through_another, 2, stage)


def again():
    run = Ranks(2)
    run.accelerator.prepare(run.engine, optimizer_of(run.model))


def test_a_new_optimizer_of_a_prepared_model_is_refused():
    message = r"PrepareError: .*the model of this call is prepared already.*accelerator\.free_memory"
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(again, 2)
