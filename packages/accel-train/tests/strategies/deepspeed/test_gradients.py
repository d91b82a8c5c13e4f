"""Gradients of an engine in float32 without ZeRO, and the noted changes of one with partitions, against plain PyTorch.

Needs no DeepSpeed: these engines have as much of it as the module asks for. The real one is tested in
``tests-integration/engines``.
"""

import copy
import math

import pytest
import torch
from torch import nn

from accel_train.errors import AccumulationError, OptionError
from accel_train.strategies.deepspeed.gradients import DeepSpeedGradients


class Engine:
    """Gradients are where torch has them, or in one partition that this only rank owns."""

    device = torch.device("cpu")

    def __init__(self, model, stage=0, clip=0.0, hooks=True):
        self.stage, self.clipping, self.hooks = stage, clip, hooks
        self.basic_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.optimizer = Partitioned(model, self, clip) if stage else self.basic_optimizer
        self.reductions, self.applied, self.enable_backward_allreduce = 0, True, True

    def gradient_clipping(self):
        return self.clipping

    def fp16_enabled(self):
        return False

    def zero_optimization_stage(self):
        return self.stage

    def zero_optimization_partition_gradients(self):
        return self.stage >= 2

    def zero_offload_optimizer(self):
        return None

    def allreduce_gradients(self):
        assert self._running_engine_step
        self.reductions += 1

    def was_step_applied(self):
        return self.applied

    def step(self):
        if self.stage >= 2:
            self.optimizer.finalize_gradient_accumulation_boundary()
        elif self.enable_backward_allreduce:
            self.reductions += 1
        if not self.applied:
            return
        if self.stage:
            self.optimizer.clip()
        if self.hooks:
            self.basic_optimizer.step()
        self.basic_optimizer.zero_grad()


class Partitioned:
    loss_scale = 8.0

    def __init__(self, model, engine, clip):
        self.model, self.engine, self.clip_grad = model, engine, clip

    def finalize_gradient_accumulation_boundary(self):
        self.engine.reductions += 1

    def scaled_global_norm(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(grads) * self.loss_scale

    @property
    def averaged_gradients(self):
        return {0: [p.grad * self.loss_scale for p in self.model.parameters()], 1: None}

    def clip(self):
        if self.clip_grad:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)


def plain():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def filled(model, times=1.0):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * times
    return model


def begun(stage=0, clip=0.0, **options):
    model = plain()
    engine = Engine(model, stage, clip, **options)
    gradients = DeepSpeedGradients(engine, model)
    gradients.before_backward(torch.ones(()))
    filled(model)
    return model, engine, gradients


def stepped(change=lambda model: None):
    """The oracle."""
    model = filled(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    change(model)
    optimizer.step()
    return model.state_dict()


def scaled(factor):
    def change(model):
        for parameter in model.parameters():
            parameter.grad *= factor

    return change


STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


@STAGES
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
def test_a_factor_is_applied_in_the_step(stage, factor):
    model, engine, gradients = begun(stage)
    gradients.scale(factor)
    assert gradients.step() is True
    torch.testing.assert_close(model.state_dict(), stepped(scaled(0.25)))
    assert engine.reductions == 1
    filled(model)  # the next window has none
    before = copy.deepcopy(model.state_dict())
    gradients.before_backward(torch.ones(()))
    gradients.step()
    for name, parameter in filled(model).named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - parameter.grad)


@STAGES
@pytest.mark.parametrize(
    "change",
    [lambda g: g.scale(0.5), lambda g: g.limit(0.1), lambda g: g.clip(0.3, 2.0), lambda g: g.complete()],
    ids=["scale", "limit", "clip", "complete"],
)
def test_what_is_noted_is_known_until_the_step_or_a_restart(stage, change):
    for end in (lambda g: g.step(), lambda g: g.restart(True)):
        _, _, gradients = begun(stage)
        assert not gradients.noted
        change(gradients)
        # In float32 without ZeRO gradients are scaled at once.
        assert gradients.noted or (stage == 0 and not gradients._complete)
        end(gradients)
        assert not gradients.noted
    assert gradients.waiting


@STAGES
def test_a_backward_after_a_factor_joins_what_is_scaled(stage):
    _, _, gradients = begun(stage)
    gradients.scale(0.5)
    # In partitions the factor is yet to come for all gradients, and must not change those of this backward.
    assert gradients.before_backward(torch.tensor(3.0)).item() == (3.0 if stage == 0 else 6.0)


@STAGES
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norms(stage, norm_type):
    _, engine, gradients = begun(stage)
    expected = nn.utils.get_total_norm([p.grad for p in filled(plain()).parameters()], norm_type)
    if stage and norm_type != 2.0:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        engine.data_parallel_group = None
    try:
        torch.testing.assert_close(gradients.norm(norm_type), expected)
        gradients.scale(0.5)
        torch.testing.assert_close(gradients.norm(norm_type), expected / 2)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert engine.reductions == 1, "reduced once, however often the norm is asked for"
    gradients.step()
    assert engine.reductions == 1, "and not again in the step"
    assert gradients.norm().item() == 0, "nothing waits"


@STAGES
@pytest.mark.parametrize("configured", [0.0, 0.1])
def test_clipping_is_torchs(stage, configured):
    model, _, gradients = begun(stage, clip=configured)
    gradients.scale(0.5)
    norm = gradients.clip(0.3, 2.0)
    found = []

    def change(other):
        scaled(0.5)(other)
        bound = min(0.3, configured) if configured else 0.3
        found.append(nn.utils.clip_grad_norm_(other.parameters(), bound))

    expected = stepped(change)
    torch.testing.assert_close(norm, found[0])
    gradients.step()
    torch.testing.assert_close(model.state_dict(), expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_engine_clips_as_configured_what_is_scaled(stage):
    model, engine, gradients = begun(stage, clip=0.2)
    gradients.scale(0.5)
    gradients.step()

    def change(other):
        scaled(0.5)(other)
        nn.utils.clip_grad_norm_(other.parameters(), 0.2)

    torch.testing.assert_close(model.state_dict(), stepped(change))
    assert engine.optimizer.clip_grad == 0.2, "its option is as it was"


def test_elements_are_limited_by_the_smallest_value():
    model, _, gradients = begun(2)
    gradients.limit(0.5)
    gradients.limit(0.1)
    gradients.limit(0.3)
    gradients.step()
    torch.testing.assert_close(
        model.state_dict(), stepped(lambda other: nn.utils.clip_grad_value_(other.parameters(), 0.1))
    )


def test_an_overflow_is_infinite():
    _, engine, gradients = begun(1)
    engine.optimizer.scaled_global_norm = lambda: torch.tensor(-1.0)
    assert gradients.norm().item() == math.inf


def test_a_step_that_was_not_applied_drops_what_was_noted():
    model, engine, gradients = begun(2)
    engine.applied = False
    before = copy.deepcopy(model.state_dict())
    gradients.scale(0.5)
    assert gradients.step() is False
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not gradients.waiting
    assert gradients.factor == 1.0


def test_an_engine_that_steps_without_torchs_hooks_is_refused():
    _, _, gradients = begun(2, hooks=False)
    gradients.step()  # nothing was to happen
    gradients.before_backward(torch.ones(()))
    gradients.scale(0.5)
    with pytest.raises(AccumulationError, match=r"stepped without torch's hooks.*zenflow, superoffload"):
        gradients.step()


def test_without_a_backward_nothing_steps():
    model = plain()
    engine = Engine(model)
    gradients = DeepSpeedGradients(engine, model)
    assert gradients.step() is True
    gradients.complete()
    assert engine.reductions == 0


def test_norms_of_partitions_on_nvme_are_refused():
    _, engine, gradients = begun(2)
    engine.zero_offload_optimizer = object
    engine.optimizer.single_partition_of_fp32_groups = [torch.ones(2)]  # without a gradient here
    with pytest.raises(OptionError, match=r"on NVMe only the L2 norm is known.*norm_type=2"):
        gradients.norm(1.0)
