"""Observers of steps: what they are told, in which order, and that some of them decide."""

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_state.monitoring.heartbeat import BACKWARD, FORWARD, OTHER, STEP
from accel_train import Accelerator
from accel_train.loop.observers import StepObserver, StepReporter


class Noting(StepObserver):
    """Notes what it is told; `verdict` is its decision."""

    def __init__(self, told, name, verdict=None):
        self.told, self.name, self.verdict = told, name, verdict

    def before_backward(self, loss, num_items, kwargs):
        self.told.append((self.name, "before_backward", num_items, dict(kwargs)))

    def after_backward(self):
        self.told.append((self.name, "after_backward"))

    def before_step(self, optimizer):
        self.told.append((self.name, "before_step"))

    def decide(self, optimizer, closure, *, together):
        self.told.append((self.name, "decide", together))
        return self.verdict

    def after_step(self, optimizer):
        self.told.append((self.name, "after_step", optimizer.step_was_skipped))

    def forget(self):
        self.told.append((self.name, "forget"))


def training(*observers, **options):
    accelerator = Accelerator(cpu=True, **options)
    accelerator._accumulator.observers += observers
    model = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_training_has_none_by_itself():
    accelerator, _, _ = training()
    assert accelerator._accumulator.observers == []
    assert accelerator.step_guard is None


def test_they_are_told_in_order():
    told = []
    accelerator, model, optimizer = training(Noting(told, "a"), Noting(told, "b"))
    accelerator.backward(model(torch.ones(1, 1)).sum(), retain_graph=True)
    optimizer.step()
    accelerator.free_memory()
    assert told == [
        ("a", "before_backward", None, {"retain_graph": True}),
        ("b", "before_backward", None, {"retain_graph": True}),
        ("a", "after_backward"),
        ("b", "after_backward"),
        ("a", "before_step"),
        ("b", "before_step"),
        ("a", "decide", True),
        ("b", "decide", True),
        ("a", "after_step", False),
        ("b", "after_step", False),
        ("a", "forget"),
        ("b", "forget"),
    ]


def test_steps_inside_a_window_are_none():
    told = []
    accelerator, model, optimizer = training(Noting(told, "a"), gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert [what for _, what, *_ in told] == ["before_backward", "after_backward"]


@pytest.mark.parametrize(("verdict", "skipped"), [(True, False), (False, True)])
def test_the_first_that_decides_takes_the_step(verdict, skipped):
    told = []
    accelerator, model, optimizer = training(Noting(told, "a", verdict), Noting(told, "b"))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.step_was_skipped is skipped
    assert ("b", "decide", True) not in told
    assert told[-1] == ("b", "after_step", skipped)


class Pulse:
    """Notes phases."""

    def __init__(self, phase):
        self.phases = [phase]

    def enter(self, phase):
        self.phases.append(phase)
        return self.phases[-2]

    def stepped(self, phase):
        self.phases.append(("stepped", phase))


@pytest.mark.parametrize(("phase", "after"), [(FORWARD, OTHER), (OTHER, OTHER), (BACKWARD, BACKWARD)])
def test_phases_are_told_to_the_launcher(phase, after):
    pulse = Pulse(phase)
    progress = StepReporter(pulse)
    progress.before_step(None)
    progress.after_step(None)
    progress.before_backward(None, None, {})
    progress.after_backward()
    assert pulse.phases == [phase, STEP, ("stepped", after), BACKWARD, OTHER]


def test_another_process_tells_nothing():
    assert type(pickle.loads(pickle.dumps(StepReporter(Pulse(OTHER))))) is StepObserver
    assert type(copy.copy(StepReporter(Pulse(OTHER)))) is StepObserver
