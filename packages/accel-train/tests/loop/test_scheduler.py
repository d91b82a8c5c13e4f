"""The scheduler that `prepare` returns advances as its optimizer does."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_state import PartialState
from accel_train import Accelerator, GradScalerKwargs
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.loop.scheduler import AcceleratedScheduler
from testkit.samples import inputs, make


def test_a_schedule_of_fixed_length_may_be_overrun_as_before():
    """As accelerate 1.15 does, on one process too."""
    accelerate = pytest.importorskip("accelerate")

    def curve(accelerator):
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        rates = []
        for x in inputs(7).split(1):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates += scheduler.get_last_lr()
        return rates

    assert curve(Accelerator()) == pytest.approx(curve(accelerate.Accelerator(cpu=True)), rel=1e-12)


def halving():
    """A schedule whose rate says how many steps it took."""
    _, optimizer = make()
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def as_it_is(metric):
    return metric


def wrapped(scheduler=None, complete=True, skipped=(False,), **options):
    optimizers = [SimpleNamespace(step_was_skipped=skip, gradients_complete=complete) for skip in skipped]
    accumulator = SimpleNamespace(agreed=as_it_is)
    options.setdefault("steps_per_call", 1)
    return AcceleratedScheduler(scheduler or halving(), optimizers, accumulator=accumulator, **options)


def steps_of(scheduler):
    return scheduler.scheduler.last_epoch


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"steps_per_call": 3}, 3),
        ({"complete": False}, 0),
        ({"complete": False, "advance_while_accumulating": True}, 1),
        ({"complete": False, "advance_while_accumulating": True, "steps_per_call": 2}, 2),
        ({"skipped": [True]}, 0),
        ({"skipped": [False, True]}, 0),
        ({"skipped": [False, False]}, 1),
        ({"complete": False, "advance_while_accumulating": True, "skipped": [True]}, 1),
        ({"complete": False, "skipped": [True], "step_with_optimizer": False, "steps_per_call": 4}, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_call_advances_as_its_optimizers_did(options, expected):
    scheduler = wrapped(**options)
    scheduler.step()
    assert steps_of(scheduler) == expected
    assert scheduler.get_last_lr() == [0.1 * 0.5**expected]


@pytest.mark.filterwarnings("error:Detected call of:UserWarning")
def test_advancing_before_the_first_optimizer_step_was_asked_for():
    wrapped(complete=False, advance_while_accumulating=True).step()


@pytest.mark.parametrize(
    "options", [{}, {"complete": False}, {"skipped": [True]}, {"complete": False, "skipped": [True]}]
)
def test_a_call_with_arguments_is_one_step_wherever_it_is_made(options):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(make()[1], factor=0.5, patience=0)
    scheduler = wrapped(plateau, steps_per_call=4, **options)
    for metric in (1.0, 2.0):
        scheduler.step(metric)
    assert scheduler.get_last_lr() == [0.05]
    scheduler.step(metrics=3.0)
    assert scheduler.get_last_lr() == [0.025]


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_schedule_of_fixed_length_is_not_overrun(steps_per_call):
    cycle = torch.optim.lr_scheduler.OneCycleLR(make()[1], 0.1, total_steps=5)
    last = torch.optim.lr_scheduler.OneCycleLR(make()[1], 0.1, total_steps=5)
    for _ in range(5):
        last.optimizer.step()
        last.step()
    scheduler = wrapped(cycle, steps_per_call=steps_per_call)
    cycle.optimizer.step()
    for _ in range(7):
        scheduler.step()
    assert scheduler.get_last_lr() == last.get_last_lr()


def test_built_by_hand_a_call_is_one_step_per_process(monkeypatch):
    optimizer = AcceleratedOptimizer(make()[1])
    scheduler = halving()
    monkeypatch.setitem(PartialState()._shared_state, "num_processes", 3)
    for split, expected in ((False, 3), (True, 4)):
        scheduler.optimizer.step()
        ours = AcceleratedScheduler(scheduler, optimizer, split_batches=split)
        assert ours.optimizers == [optimizer]
        ours.step()
        assert steps_of(ours) == expected


@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
def test_everything_else_is_the_wrapped_schedulers():
    scheduler = wrapped()
    scheduler.scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.state_dict() == scheduler.scheduler.state_dict()
    assert scheduler.get_lr() == [0.05]
    assert scheduler.base_lrs == [0.1]
    scheduler.base_lrs = [0.2]
    assert scheduler.scheduler.base_lrs == [0.2]
    scheduler.base_lrs = [0.1]
    with pytest.raises(AttributeError, match="missing"):
        _ = scheduler.missing
    fresh = wrapped()
    fresh.load_state_dict(scheduler.state_dict())
    assert steps_of(fresh) == 1
    stepped = torch.optim.lr_scheduler.StepLR(make()[1], 2)
    copied = pickle.loads(pickle.dumps(wrapped(stepped)))
    assert copied.step_size == 2


def test_an_accelerators_scheduler_waits_for_the_optimizer_that_skips():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    models = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    *models, _, _, first, second = accelerator.prepare(*models, *optimizers, *schedulers)
    for model, factor in zip(models, (float("inf"), 1.0), strict=True):
        accelerator.backward(model(torch.ones(1, 3)).sum() * factor)
    for optimizer in accelerator._optimizers:
        optimizer.step()
    for scheduler in (first, second):
        scheduler.step()
    assert (steps_of(first), steps_of(second)) == (0, 1)


def test_a_client_may_say_that_the_step_was_skipped():
    """As code does that steps the wrapped optimizer itself; the next step says it anew."""
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(plain)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(plain, 1), optimizer, steps_per_call=1)
    optimizer.step()
    optimizer._is_overflow = True
    scheduler.step()
    assert (optimizer.step_was_skipped, scheduler.get_last_lr()) == (True, [1.0])
    optimizer.step()
    scheduler.step()
    assert (optimizer._is_overflow, scheduler.get_last_lr()) == (False, [pytest.approx(0.1)])


SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=12, cycle_momentum=False),
}


@pytest.mark.filterwarnings("ignore:load_state:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, True])
def test_rates_are_scaled_after_loading(tmp_path, kind, tensor):
    """The recipe of the page on checkpoints; the oracle is the same schedule, scaled all along."""

    def build(rate):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 1)
        given = torch.tensor(rate, dtype=torch.float64) if tensor else rate
        optimizer = torch.optim.SGD(model.parameters(), lr=given)
        scheduler = SCHEDULES[kind](optimizer)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    def rates(steps, model, optimizer, scheduler):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    _, *whole = build(0.5)
    expected = [rate * 0.1 for rate in rates(8, *whole)[4:]]
    accelerator, *parts = build(0.5)
    rates(4, *parts)
    accelerator.save_state(tmp_path / "state")

    accelerator, model, optimizer, scheduler = build(0.5)
    accelerator.load_state(tmp_path / "state")
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr", "max_lr", "min_lr"} & set(group):
            group[name] *= 0.1
    scheduler.base_lrs = [rate * 0.1 for rate in scheduler.base_lrs]
    assert rates(4, model, optimizer, scheduler) == pytest.approx(expected)


class Warmup:
    """A schedule of the script's own: it counts its calls, and cannot be copied."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def rate(self, step):
        self.calls += 1
        return 0.5**step


def test_a_load_neither_copies_nor_calls_what_the_script_gave(tmp_path):
    def script():
        accelerator, warmup = Accelerator(cpu=True), Warmup()
        model, optimizer = make()
        _, optimizer = accelerator.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, warmup.rate)
        return accelerator, warmup, optimizer, accelerator.prepare(schedule)

    accelerator, _, optimizer, schedule = script()
    optimizer.step()
    schedule.step()
    accelerator.save_state(tmp_path / "state")
    other, warmup, _, restored = script()
    calls = warmup.calls
    other.load_state(tmp_path / "state")
    assert warmup.calls == calls
    assert restored.scheduler.last_epoch == schedule.scheduler.last_epoch


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["chained", "sequential"])
def test_schedules_of_several_parts_are_loaded(tmp_path, kind, steps):
    """Also one whose part has no step left: OneCycleLR refuses more than it was made for."""

    def prepared():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = torch.optim.lr_scheduler
        first = rates.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        parts = [first, rates.ConstantLR(optimizer, 0.5, 3)]
        whole = (
            rates.ChainedScheduler(parts) if kind == "chained" else rates.SequentialLR(optimizer, parts, [4])
        )
        return accelerator, *accelerator.prepare(model, optimizer, whole)

    accelerator, model, optimizer, schedule = prepared()
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(tmp_path / "state")
    expected = schedule.get_last_lr()
    accelerator, model, optimizer, schedule = prepared()
    accelerator.load_state(tmp_path / "state")
    assert schedule.get_last_lr() == expected
