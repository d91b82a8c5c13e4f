"""Two models with windows, optimizers, schedules and averages of their own, against a plain loop, and resumed anywhere.

What happens to one model (its window ends, its step is skipped, its loss is a spike) changes nothing of the other.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_train import Accelerator, AveragedWeights, FullyShardedDataParallelPlugin
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
BATCHES, STEPS, EVERY = 24, 2, 3
"""Batches, micro-batches of a window, and after how many batches the generator has a micro-batch."""


@dataclass(frozen=True)
class Script:
    """How the loop is written.

    Attributes:
        after: optimizers step after both blocks, in every batch.
        spikes: by model, the batch whose loss is so many times larger, or NaN.
    """

    after: bool = False
    spikes: tuple[tuple[str, int, float], ...] = ()

    def factor(self, name, batch):
        return next((factor for model, at, factor in self.spikes if (model, at) == (name, batch)), 1.0)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch_of(number, ranks, rank):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2 * ranks, 4, dtype=torch.float64, generator=generator)[2 * rank : 2 * rank + 2]


def loss_of(model, x, factor):
    return (model(x) - x.sum(1, keepdim=True)).square().mean() * factor


def turns(batch):
    """The models that have a micro-batch: the discriminator always, the generator now and then."""
    return ["d", "g"] if batch % EVERY == 0 else ["d"]


def plain(script, ranks):
    """By hand, on one process: weights, averages, rates and skipped steps of each model."""
    result = {}
    for name, seed in (("d", 1), ("g", 2)):
        model = net(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        mine = [batch for batch in range(BATCHES) if name in turns(batch)]
        skipped, losses = [], []
        for window in (mine[low : low + STEPS] for low in range(0, len(mine), STEPS)):
            total = 0.0
            for batch in window:
                loss = loss_of(model, batch_of(batch, ranks, 0), script.factor(name, batch)) / len(window)
                if ranks > 1:
                    loss = loss_of(model, whole(batch, ranks), script.factor(name, batch)) / len(window)
                loss.backward()
                total += loss.item()
            known = sorted(losses)
            bad = not math.isfinite(total) or (len(losses) >= 2 and total > 5 * known[len(known) // 2])
            if not bad:
                losses.append(total)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                average.update_parameters(model)
            optimizer.zero_grad()
            skipped.append(bad)
        weights = [p.detach().clone() for p in model.parameters()]
        means = [p.detach().clone() for p in average.module.parameters()]
        result[name] = weights, means, schedule.get_last_lr(), skipped
    return result


def whole(batch, ranks):
    return torch.cat([batch_of(batch, ranks, rank) for rank in range(ranks)])


class Run:
    """The same with the library."""

    def __init__(self, script, strategy, folder=None):
        options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp2" else {}
        self.script = script
        self.accelerator = accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=STEPS, step_scheduler_with_optimizer=True, **options
        )
        accelerator.scale_scheduler = False
        if script.spikes:
            accelerator.guard_steps(loss_spike=5.0, warmup=2, max_consecutive=2)
        self.parts = {}
        for name, seed in (("d", 1), ("g", 2)):
            model = net(seed)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            model, optimizer = accelerator.prepare(model, optimizer)
            schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate_of))
            average = AveragedWeights(accelerator, model, decay=0.5)
            self.parts[name] = model, optimizer, schedule, average
        self.skipped = {"d": [], "g": []}
        if folder:
            accelerator.load_state(folder)

    def train(self, begin=0, stop=BATCHES):
        for number in range(begin, stop):
            ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
            x = batch_of(number, ranks, rank)
            for name in turns(number):
                model = self.parts[name][0]
                with self.accelerator.accumulate(model):
                    self.accelerator.backward(loss_of(model, x, self.script.factor(name, number)))
                    if not self.script.after:
                        self.step(name, entered=True)
            if self.script.after:
                for name in self.parts:
                    self.step(name, entered=name in turns(number))
        return self

    def step(self, name, entered):
        accelerator, (model, optimizer, schedule, average) = self.accelerator, self.parts[name]
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if entered and accelerator.gradients_complete(model):
            self.skipped[name].append(optimizer.step_was_skipped)
            average.update()
        optimizer.zero_grad()

    def _copied(self, model):
        return [value.clone() for value in self.accelerator.get_state_dict(model).values()]

    def result(self):
        found = {}
        for name, (model, _, schedule, average) in self.parts.items():
            weights = self._copied(model)
            with average.applied():
                means = self._copied(model)
            found[name] = weights, means, schedule.get_last_lr(), self.skipped[name]
        return found


def rate_of(step):
    return 0.9**step


def trained(script, strategy):
    return Run(script, strategy).train().result()


SCRIPTS = {
    "inside": Script(),
    "after": Script(after=True),
    "a spike of the generator": Script(spikes=(("g", 18, 1e4),)),
    "a spike of the discriminator": Script(spikes=(("d", 13, 1e4),)),
    "spikes, steps after": Script(after=True, spikes=(("g", 18, 1e4), ("d", 13, math.nan))),
}


def compare(found, expected):
    for name in "dg":
        for mine, right in zip(found[name][:2], expected[name][:2], strict=True):
            for one, other in zip(mine, right, strict=True):
                torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
        assert found[name][2] == pytest.approx(expected[name][2])
        assert found[name][3] == expected[name][3]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_model_is_trained_as_if_it_were_alone(script, strategy):
    ranks = 1 if strategy == "single" else 2
    expected = plain(SCRIPTS[script], ranks)
    if SCRIPTS[script].spikes:
        assert any(expected["g"][3]) or any(expected["d"][3]), "a spike is skipped"
    for found in worlds.run(trained, ranks, SCRIPTS[script], strategy):
        compare(found, expected)


def resumed(script, strategy, folder):
    expected = Run(script, strategy).train().result()
    for stop in range(1, BATCHES, 5 if strategy != "single" else 1):
        before = Run(script, strategy).train(0, stop)
        before.accelerator.save_state(f"{folder}/{stop}")
        after = Run(script, strategy, f"{folder}/{stop}")
        after.skipped = {name: list(found) for name, found in before.skipped.items()}
        found = after.train(stop).result()
        for name in "dg":
            assert found[name][2:] == expected[name][2:], (stop, name)
            for mine, right in zip(found[name][:2], expected[name][:2], strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine, right, strict=True)), (stop, name)


@pytest.mark.wide(but=["after-ddp", "a spike of the generator-single"])
@pytest.mark.parametrize("strategy", ["single", "ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
@pytest.mark.parametrize("script", ["after", "spikes, steps after", "a spike of the generator"])
def test_a_run_that_stops_anywhere_goes_on_bit_for_bit(script, strategy, tmp_path):
    worlds.run(
        resumed, 1 if strategy == "single" else 2, SCRIPTS[script], strategy, str(tmp_path), timeout=120
    )
