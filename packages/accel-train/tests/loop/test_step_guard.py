"""Skipped updates against a plain loop that leaves the same updates out."""

import itertools
import logging
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import Accelerator, AccumulationError, IncompatibleOptionsError, OptionError, StepGuardError
from accel_train.loop.step_guard import StepGuard, StepGuardOptions
from accel_train.strategies.base import Strategy
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.deepspeed.strategy import DeepSpeedStrategy
from accel_train.strategies.megatron.strategy import MegatronStrategy
from testkit import worlds
from testkit.conformance import INSTALLED

pytestmark = pytest.mark.usefixtures("kept_ranks")
FACTORS = [1, 1, 2, 1, 1, 50, 1, math.nan, 1, 40, 1, 1, math.inf, 3, 1, 1]  # of the loss of each update


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def inputs(rank, count):
    return torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(5 + rank), dtype=torch.float64)


def loss_of(model, x, factor):
    return (model(x) ** 2).mean() * factor + 0.5


def plain(factors, *, ranks=1, steps=1, spike=None, reference="median", history=100, warmup=3):
    """The loop by hand: weights after each update, which were skipped, and the learning rates."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = [inputs(rank, len(factors) * steps) for rank in range(ranks)]
    losses, weights, skipped, rates = [], [], [], []
    average = None
    for update, factor in enumerate(factors):
        parts = [
            loss_of(model, data[rank][update * steps + micro], factor)
            for rank in range(ranks)
            for micro in range(steps)
        ]
        loss = sum(parts) / len(parts)
        loss.backward()
        value = loss.item()
        bad = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        if spike is not None and len(losses) >= warmup:
            known = statistics.median(losses[-history:]) if reference == "median" else average
            bad = bad or not value <= spike * known
        if not bad:
            losses.append(value)
            average = value if average is None else average + 2 / (history + 1) * (value - average)
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        skipped.append(bad)
        weights.append(model.weight.detach().clone())
        rates.append(scheduler.get_last_lr()[0])
    return weights, skipped, rates


def guarded(factors, *, strategy=None, steps=1, spike=None, clip=None, **options):
    """The same with the library."""
    accelerator = Accelerator(
        cpu=True, strategy=strategy, gradient_accumulation_steps=steps, scale_scheduler=False
    )
    guard = accelerator.guard_steps(loss_spike=spike, **options)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = inputs(accelerator.strategy.batch.index, len(factors) * steps)
    weights, skipped, rates = [], [], []
    for number, x in enumerate(data):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, factors[number // steps]))
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped.append(accelerator.optimizer_step_was_skipped)
            weights.append(accelerator.get_state_dict(model)["weight"].clone())
            rates.append(scheduler.get_last_lr()[0])
    return weights, skipped, rates, dict(guard.skipped)


def compare(found, expected):
    for weight, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-9)
    assert found[1] == expected[1]
    assert found[2] == pytest.approx(expected[2])


@pytest.mark.parametrize("steps", [1, 3])
def test_updates_with_gradients_that_are_not_finite_are_left_out(steps):
    found = guarded(FACTORS, steps=steps)
    compare(found, plain(FACTORS, steps=steps))
    assert found[1] == [not math.isfinite(factor) for factor in FACTORS]
    assert found[3] == {"gradients": 2}


def test_a_large_clip_norm_decides_without_looking_at_the_gradients_again(monkeypatch):
    looked = []
    monkeypatch.setattr(Strategy, "has_nonfinite_gradients", lambda *args: looked.append(args))
    compare(guarded(FACTORS, clip=1e9), plain(FACTORS))
    assert not looked


@pytest.mark.parametrize("reference", ["median", "ema"])
@pytest.mark.parametrize(("steps", "history"), [(1, 100), (2, 4)])
def test_spikes_of_the_loss_are_left_out(reference, steps, history):
    options = {"spike": 4.0, "reference": reference, "history": history, "warmup": 3}
    found = guarded(FACTORS, steps=steps, **options)
    expected = plain(FACTORS, steps=steps, **options)
    compare(found, expected)
    assert [number for number, bad in enumerate(found[1]) if bad] == [5, 7, 9, 12]
    assert sum(found[3].values()) == 4


@pytest.mark.parametrize("strategy", [None, "fsdp2"])
@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_skip_alike(strategy, steps):
    options = {"spike": 4.0, "warmup": 3}
    expected = plain(FACTORS, ranks=2, steps=steps, **options)
    for found in worlds.run(guarded, 2, FACTORS, strategy=strategy, steps=steps, **options):
        compare(found, expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_engine_that_divides_parameters_and_hides_gradients_skips_alike(steps, monkeypatch):
    monkeypatch.syspath_prepend(INSTALLED)  # registers the strategy "fake", in ranks as well
    options = {"spike": 4.0, "warmup": 3}
    expected = plain(FACTORS, steps=steps, **options)
    for found in worlds.run(guarded, 2, FACTORS, strategy="fake", steps=steps, **options):
        compare(found, expected)


def only_one_rank_is_bad(strategy):
    accelerator = Accelerator(strategy=strategy)
    guard = accelerator.guard_steps()
    model, other = make_model(), make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(other.parameters(), lr=0.1)  # of parameters that nobody reduces
    alone = accelerator.prepare(alone)
    before = other.weight.detach().clone()
    accelerator.backward(loss_of(model, inputs(0, 1)[0], 1) + loss_of(other, inputs(0, 1)[0], 1))
    if accelerator.process_index == 1:
        other.weight.grad[0, 1] = math.nan
    optimizer.step()
    alone.step()
    return (
        optimizer.step_was_skipped,
        alone.step_was_skipped,
        torch.equal(other.weight, before),
        guard.skipped,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_one_rank_finds_holds_for_all(strategy):
    assert worlds.run(only_one_rank_is_bad, 2, strategy) == [(False, True, True, {"gradients": 1})] * 2


def test_losses_of_items_are_weighed_by_items():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    guard = accelerator.guard_steps(loss_spike=2.0, warmup=1)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    # Means over items: 1, then 90 / 60 = 1.5, then 2.5, which is above 2 * 1.25 only by items, not by micro-batches.
    windows = [[(10.0, 10), (20.0, 20)], [(30.0, 20), (60.0, 40)], [(1.0, 1), (160.0, 60)]]
    skipped = []
    for window in windows:
        for loss, items in window:
            with accelerator.accumulate(model):
                count = torch.tensor(items) if items == 20 else items
                accelerator.backward(model.weight.sum() * 0 + loss, num_items=count)
                optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, False, True]
    assert guard.last_reason == "loss"


def overflowing(loss_spike=None):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    guard = accelerator.guard_steps(loss_spike=loss_spike, warmup=1)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    scales, skipped = [], []
    for factor in (1.0, 1e30, math.nan, 1.0):
        accelerator.backward(model(torch.ones(2, 3)).float().sum() * 0 + model.weight.sum() * factor + 1.0)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        scales.append(accelerator.scaler.get_scale())
    accelerator.backward(model.weight.sum())
    return skipped, guard, accelerator.scaler.get_scale()


@pytest.mark.parametrize("loss_spike", [None, 1e35])
def test_what_the_scaler_skips_is_counted_once(loss_spike):
    skipped, guard, scale = overflowing(loss_spike)
    assert skipped == [False, False, True, False]
    assert guard.skipped == {"gradients": 1}
    assert scale == 65536 / 2


def test_a_spike_under_fp16_is_skipped_and_its_gradients_dropped():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    guard = accelerator.guard_steps(loss_spike=3.0, warmup=1)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    weights = [model.weight.item()]
    for loss in (1.0, 5.0, 1.0):
        accelerator.backward(model.weight.sum() - model.weight.sum().detach() + loss)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    steps = [before - after for before, after in itertools.pairwise(weights)]
    assert steps == pytest.approx([0.5, 0.0, 0.5], abs=1e-6)
    assert guard.skipped == {"loss": 1}
    assert accelerator.scaler.get_scale() == 65536


def diverging(limit):
    accelerator = Accelerator(cpu=True)
    accelerator.guard_steps(max_consecutive=limit)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    bad = [False, True, False, *[True] * 10]
    for number, is_bad in enumerate(bad):
        x = inputs(0, 1)[0]
        if is_bad and accelerator.process_index == accelerator.num_processes - 1:
            x = x * math.nan
        accelerator.backward(loss_of(model, x, 1))
        try:
            optimizer.step()
        except StepGuardError as error:
            return number, str(error)
        optimizer.zero_grad()
    return len(bad), ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_in_a_row_raise_on_all_ranks(ranks):
    for number, message in worlds.run(diverging, ranks, 3):
        assert number == 5
        assert (
            "3 updates in a row were skipped (max_consecutive=3); the last one because gradients are inf"
            in message
        )
        assert "weight, bias" in message or "module.weight" in message
    assert diverging(None) == (13, "")


def resumable(folder, stop, spike, steps):
    """Train; with `stop` save after so many micro-batches and go on in a new accelerator that loads."""
    factors = FACTORS

    def start():
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        accelerator.guard_steps(loss_spike=spike, warmup=3)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return accelerator, *accelerator.prepare(model, optimizer)

    accelerator, model, optimizer = start()
    data = inputs(accelerator.process_index, len(factors) * steps)
    for number, x in enumerate(data):
        if number == stop:
            accelerator.save_state(folder)
            accelerator, model, optimizer = start()
            accelerator.load_state(folder)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, factors[number // steps]))
            optimizer.step()
            optimizer.zero_grad()
    guard = accelerator.step_guard
    return accelerator.get_state_dict(model)["weight"], guard.skipped, guard.state_dict([optimizer])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stop", [9, 20, 23])
def test_a_resumed_run_skips_what_the_uninterrupted_one_does(tmp_path, ranks, stop):
    whole = worlds.run(resumable, ranks, None, None, 4.0, 2)
    resumed = worlds.run(resumable, ranks, str(tmp_path / "state"), stop, 4.0, 2)
    for (weight, skipped, state), (expected, counts, history) in zip(resumed, whole, strict=True):
        assert torch.equal(weight, expected)
        assert skipped == counts
        assert state == history


def half_of_a_window(folder, load):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    guard = accelerator.guard_steps(loss_spike=4.0)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(DataLoader(torch.zeros(16, 1), batch_size=1))
    if load:
        accelerator.load_state(folder)
    for _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(
                model(inputs(0, 1)[0]).sum() * 0 + (10.0 if load else 3.0 + accelerator.process_index)
            )
            optimizer.step()
        break
    if not load:
        accelerator.save_state(folder)
    return guard.state_dict([optimizer])["optimizers"][0]["losses"]


def test_another_number_of_ranks_takes_up_the_losses_of_a_window(tmp_path):
    folder = str(tmp_path / "state")
    assert worlds.run(half_of_a_window, 2, folder, False) == [[], []]
    assert worlds.run(half_of_a_window, 1, folder, True) == [[pytest.approx((3 + 4 + 10) / 3)]]
    assert worlds.run(half_of_a_window, 3, folder, True) == [[pytest.approx((3 + 4 + 30) / 5)]] * 3


def test_a_state_without_a_guard_loads_and_one_with_is_ignored(tmp_path):
    def state(guard, load=None):
        accelerator = Accelerator(cpu=True)
        if guard:
            accelerator.guard_steps(loss_spike=2.0)
        model = make_model()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if load is None:
            return accelerator.save_state(tmp_path / str(guard))
        return accelerator.load_state(load)

    without, guarded_state = state(False), state(True)
    state(True, load=without)
    state(False, load=guarded_state)


def test_two_optimizers_of_one_loss_share_its_verdict_and_have_histories_of_their_own():
    accelerator = Accelerator(cpu=True)
    guard = accelerator.guard_steps(loss_spike=2.0, warmup=1)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    prepared = accelerator.prepare(
        first, second, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
    )
    first, second, a, b = prepared
    for loss in (1.0, 5.0, 1.0):
        accelerator.backward(first.weight.sum() * 0 + second.weight.sum() * 0 + loss)
        a.step()
        b.step()
        assert a.step_was_skipped == b.step_was_skipped == (loss == 5.0)
    assert guard.skipped == {"loss": 2}
    accelerator.free_memory()
    assert guard.state_dict([a])["optimizers"][0]["seen"] == 0


def test_bad_options_are_refused():
    for options, message in (
        ({"loss_spike": 1.0}, "loss_spike=1.0.: loss_spike must be a factor above 1"),
        ({"loss_spike": math.inf}, "must be a factor above 1"),
        ({"reference": "mean"}, "reference='mean'"),
        ({"history": 0}, "history=0"),
        ({"max_consecutive": 0}, "max_consecutive=0"),
        ({"warmup": 20, "history": 10}, "must not be larger than history"),
        ({"nonfinite_gradients": False}, "would skip nothing"),
    ):
        with pytest.raises(OptionError, match=message):
            Accelerator(cpu=True).guard_steps(**options)
    accelerator = Accelerator(cpu=True)
    assert accelerator.step_guard is None
    assert accelerator.guard_steps() is accelerator.step_guard
    with pytest.raises(OptionError, match="called twice"):
        accelerator.guard_steps()


def test_a_closure_is_refused():
    accelerator = Accelerator(cpu=True)
    accelerator.guard_steps()
    _, optimizer = accelerator.prepare(nn.Linear(1, 1), torch.optim.LBFGS(nn.Linear(1, 1).parameters()))
    with pytest.raises(OptionError, match=r"step\(closure\) cannot be combined with guard_steps"):
        optimizer.step(lambda: torch.zeros(()))


def test_engines_that_own_the_step_are_refused():
    assert not DeepSpeedStrategy.capabilities.skips_steps
    assert not MegatronStrategy.capabilities.skips_steps

    class Engine(Strategy):
        name = "engine"
        capabilities = Capabilities(skips_steps=False)

    options = SimpleNamespace(
        device=torch.device("cpu"), mesh=SimpleNamespace(batch=None, draws=None, loss=None)
    )
    options.precision = SimpleNamespace(scaler=None)
    with pytest.raises(IncompatibleOptionsError, match="the strategy 'engine' cannot"):
        StepGuard(StepGuardOptions(), Engine(options), 2, [], SimpleNamespace())


def uneven():
    accelerator = Accelerator()
    accelerator.even_batches = False
    accelerator.guard_steps()
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        accelerator.backward(loss_of(model, inputs(0, 1)[0], 1))
        try:
            optimizer.step()
        except AccumulationError as error:
            return str(error)
    return ""


def test_ranks_that_may_run_out_of_data_are_refused():
    for message in worlds.run(uneven, 2):
        assert "a rank without data cannot take part in" in message


def test_a_skip_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        guarded([1, math.nan])
    assert any(
        "An update was skipped: gradients are inf or NaN. 1 were" in r.getMessage() for r in caplog.records
    )
