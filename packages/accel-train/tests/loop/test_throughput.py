"""Throughput against a list of times and items that is kept beside it."""

import gc
import logging
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from accel_train import Accelerator, ArgumentTypeError, OptionError, Ranks, ThroughputMeter
from testkit import worlds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def training(world=1, loss=None, name="cpu"):
    return SimpleNamespace(
        sync_gradients=True,
        device=torch.device(name),
        mixed_precision="bf16",
        num_processes=world,
        strategy=SimpleNamespace(loss=loss or Ranks()),
    )


def drive(meter, clock, steps, accelerator, as_tensor=False):
    """Take steps of (micro-batches, seconds); returns what happened as (time, items so far) after each."""
    total, marks = 0, [(clock.now, 0)]
    for micro_batches, seconds in steps:
        for place, items in enumerate(micro_batches):
            accelerator.sync_gradients = place == len(micro_batches) - 1
            clock.now += seconds / len(micro_batches)
            meter.update(torch.tensor(items) if as_tensor else items)
            total += items
        marks.append((clock.now, total))
    return marks


STEPS = [([3, 4], 2.0), ([10], 1.0), ([5, 5, 5], 0.5), ([1], 4.0), ([7, 2], 0.25), ([9], 1.5)]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 50])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_rates_are_those_of_the_recorded_times(as_tensor, window, warmup):
    clock, accelerator = Clock(), training()
    meter = ThroughputMeter(accelerator, window=window, warmup=warmup, clock=clock)
    assert meter.values() == {"tokens": 0}
    marks = drive(meter, clock, STEPS, accelerator, as_tensor)
    (since, before), (now, total) = marks[-1 - min(window, len(STEPS))], marks[-1]
    read = meter.read()
    assert (read.items, read.steps) == (total, len(STEPS))
    assert read.items_per_second == pytest.approx((total - before) / (now - since))
    assert read.step_seconds == pytest.approx((now - since) / min(window, len(STEPS)))
    warm_time, warm_items = marks[warmup]
    assert read.items_per_second_overall == pytest.approx((total - warm_items) / (now - warm_time))
    assert read.peak_memory is None
    assert read.mfu is None


def test_a_micro_batch_inside_a_window_counts_with_the_step_that_ends_it():
    clock, accelerator = Clock(), training()
    meter = ThroughputMeter(accelerator, warmup=0, clock=clock)
    drive(meter, clock, [([4], 1.0)], accelerator)
    accelerator.sync_gradients = False
    clock.now += 5
    meter.update(100)
    read = meter.read()
    assert (read.items, read.steps, read.items_per_second) == (104, 1, 4.0)


def test_pauses_do_not_count():
    clock, accelerator = Clock(), training()
    meter = ThroughputMeter(accelerator, warmup=0, clock=clock)
    drive(meter, clock, [([6], 1.0)], accelerator)

    def evaluate():
        with meter.paused():
            clock.now += 30
            with meter.paused():
                clock.now += 30
            clock.now += 40
            raise KeyError("evaluation failed")

    with pytest.raises(KeyError):
        evaluate()
    drive(meter, clock, [([6], 1.0)], accelerator)
    read = meter.read()
    assert read.items_per_second == read.items_per_second_overall == pytest.approx(6.0)
    assert read.step_seconds == pytest.approx(1.0)


def test_mfu_is_achieved_over_possible():
    clock, accelerator = Clock(), training()
    meter = ThroughputMeter(accelerator, flops_per_item=50.0, peak=1000.0, warmup=0, clock=clock)
    drive(meter, clock, [([10], 1.0), ([6], 1.0)], accelerator)
    assert meter.values()["mfu"] == pytest.approx(8 * 50 / 1000)
    # Two ranks that compute the same items together have two peaks.
    both = Ranks(size=1, index=0, index_of=(0, 0))
    accelerator = training(world=2, loss=both)
    meter = ThroughputMeter(accelerator, flops_per_item=50.0, peak=1000.0, warmup=0, clock=clock)
    drive(meter, clock, [([10], 1.0)], accelerator)
    assert meter.read().mfu == pytest.approx(10 * 50 / 2000)


def test_an_unknown_device_says_so_once_and_has_no_mfu(caplog):
    clock, accelerator = Clock(), training()
    Accelerator()  # the logger asks which process this is
    meter = ThroughputMeter(accelerator, flops_per_item=50.0, clock=clock)
    drive(meter, clock, STEPS, accelerator)
    with caplog.at_level(logging.WARNING):
        assert meter.read().mfu is None
        assert "mfu" not in meter.values()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "the peak of 'cpu' in precision 'bf16' is not known" in messages[0]


def test_a_known_device_gives_its_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    clock, accelerator = Clock(), training(name="cuda")
    meter = ThroughputMeter(accelerator, flops_per_item=312e10, warmup=0, clock=clock)
    drive(meter, clock, [([50], 1.0)], accelerator)
    assert meter.values()["mfu"] == pytest.approx(0.5)
    assert meter.values()["peak_memory_bytes"] == 123


def test_bad_arguments_are_refused():
    for options, message in (
        ({"window": 0}, "window must be at least 1"),
        ({"warmup": -1}, "warmup at least 0"),
        ({"flops_per_item": 0}, "flops_per_item=0.: expected a positive number"),
        ({"peak": float("nan")}, "peak=nan.: expected a positive number"),
        ({"precision": "bf8"}, "precision='bf8'"),
    ):
        with pytest.raises(OptionError, match=message):
            ThroughputMeter(training(), **options)
    meter = ThroughputMeter(training())
    with pytest.raises(OptionError, match="items=-1"):
        meter.update(-1)
    with pytest.raises(ArgumentTypeError, match="got float"):
        meter.update(1.5)
    assert meter.read().items == 0


@pytest.mark.wide
def test_updates_keep_no_memory():
    accelerator = training()
    meter, tensors = ThroughputMeter(accelerator), ThroughputMeter(accelerator)
    count = torch.tensor(5)
    for _ in range(200):
        meter.update(5)
        tensors.update(count)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(2000):
        meter.update(5)
        tensors.update(count)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2000


def test_it_follows_the_windows_of_an_accelerator():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.randn(16, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    meter = ThroughputMeter(accelerator, unit="samples")
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            meter.update(len(batch))
    read = meter.read()
    assert (read.items, read.steps) == (16, 3)
    accelerator.log(meter.values(all_ranks=True))


def ranks_differ():
    accelerator = Accelerator()
    clock = Clock()
    meter = ThroughputMeter(accelerator, flops_per_item=2.0, peak=10.0, warmup=0, clock=clock)
    rank = accelerator.process_index
    for _ in range(3):
        clock.now += 1.0 + rank
        meter.update(torch.tensor(4 + rank))
    own, together = meter.read(), meter.read(all_ranks=True)
    return own, together


def test_all_ranks_together_are_as_slow_as_the_slowest():
    for rank, (own, together) in enumerate(worlds.run(ranks_differ, 2)):
        assert own.items_per_second == pytest.approx((4 + rank) / (1 + rank))
        assert together.items == 3 * (4 + 5)
        assert together.items_per_second == pytest.approx(9 / 2)
        assert together.step_seconds == pytest.approx(2.0)
        assert together.mfu == pytest.approx(9 / 2 * 2 / 20)
