"""Training in each precision gives what a loop of plain PyTorch gives, on the same device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from testkit.figures import Figure, NotRunError, Run
from testkit.gpt import GPT, next_token_loss, random_ids

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCUMULATED = 2
CLIP = 1.0
LOSS_THAT_OVERFLOWS = 1e32  # times the scale of 65536, its gradients are inf in float32


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        run: where.
        precision: as `Accelerator` calls it.
        poisoned: numbers of the micro-batches whose loss overflows.
    """

    run: Run
    precision: str
    poisoned: tuple[int, ...] = ()

    def parts(self) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR, DataLoader[Any]]:
        """The same for every loop: model, optimizer, scheduler and data."""
        torch.manual_seed(0)
        length = self.run.pick(12, 128)
        layers, width, heads, vocabulary = self.run.pick((1, 16, 2, 31), (4, 256, 4, 503))
        model = GPT(layers, width, heads, vocabulary, length).to(self.run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.run.pick(3e-2, 3e-3))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
        rows = self.run.pick(4, 16)
        ids = random_ids(rows * self.run.pick(12, 40), length, vocabulary)
        return model, optimizer, scheduler, DataLoader(ids, batch_size=rows)  # type: ignore[arg-type]

    def loss(self, number: int, logits: Tensor, ids: Tensor) -> Tensor:
        """Of one micro-batch."""
        found = next_token_loss(logits, ids)
        return found * LOSS_THAT_OVERFLOWS if number in self.poisoned else found


@dataclass(frozen=True)
class Outcome:
    """What a loop leaves behind."""

    losses: list[float]
    weights: list[Tensor]
    skipped: int
    scale: float
    rate: float
    """The learning rate at the end."""

    def difference(self, other: Outcome) -> float:
        """The largest of all losses and weights."""
        losses = [abs(mine - theirs) for mine, theirs in zip(self.losses, other.losses, strict=True)]
        weights = [
            float((mine - theirs).abs().max())
            for mine, theirs in zip(self.weights, other.weights, strict=True)
        ]
        found = torch.tensor([*losses, *weights, abs(self.rate - other.rate)], dtype=torch.float64)
        return float(found.max())  # NaN if one is


def deterministic() -> None:
    """Let the same computation give the same bits where PyTorch can."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def plain_loop(task: Task) -> Outcome:
    """Plain PyTorch."""
    model, optimizer, scheduler, loader = task.parts()
    device, dtype = task.run.device, DTYPES[task.precision]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    losses, skipped = [], 0
    for number, batch in enumerate(loader):
        ids = batch.to(device)
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(ids)
        loss = task.loss(number, logits, ids)
        losses.append(float(loss.detach()))
        scaler.scale(loss / ACCUMULATED).backward()
        if (number + 1) % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                scheduler.step()
            optimizer.zero_grad()
    return Outcome(losses, _weights(model), skipped, scaler.get_scale(), scheduler.get_last_lr()[0])


def our_loop(task: Task, **options: Any) -> Outcome:
    """With the accelerator."""
    accelerator = task.run.accelerator(
        mixed_precision=task.precision, gradient_accumulation_steps=ACCUMULATED, **options
    )
    plain, *rest = task.parts()
    model, optimizer, scheduler, loader = accelerator.prepare(plain, *rest)
    losses, skipped = [], 0
    for number, ids in enumerate(loader):
        with accelerator.accumulate(model):
            loss = task.loss(number, model(ids), ids)
            losses.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            skipped += accelerator.sync_gradients and accelerator.optimizer_step_was_skipped
            scheduler.step()
            optimizer.zero_grad()
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    accelerator.free_memory()
    return Outcome(losses, _weights(plain), skipped, scale, scheduler.get_last_lr()[0])


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(run: Run, precision: str) -> Iterator[Figure]:
    deterministic()
    task = Task(run, precision)
    expected, again, found = plain_loop(task), plain_loop(task), our_loop(task)
    spread = again.difference(expected)
    note = f"losses, weights and learning rate; the plain loop differs from itself by {spread:.2g}"
    yield run.within("difference to plain PyTorch", found.difference(expected), spread, "", note)
    yield run.within("last loss over first", found.losses[-1] / found.losses[0], 0.95)


def overflow(run: Run) -> Iterator[Figure]:
    """Steps whose gradients overflow are left out, and the scale halves."""
    deterministic()
    task = Task(run, "fp16", poisoned=(3, 6))
    expected, found = plain_loop(task), our_loop(task)
    assert expected.skipped == 2, "the plain loop did not overflow where it should"
    yield run.exact("skipped steps", found.skipped, expected.skipped)
    yield run.exact("scale afterwards", found.scale, expected.scale)
    again = plain_loop(task)
    spread = again.difference(expected)
    yield run.within("difference to plain PyTorch", found.difference(expected), spread)


def compiled(run: Run) -> Iterator[Figure]:
    """`dynamo_backend` trains as eager PyTorch does; small sizes do without the inductor, which takes a compiler."""
    backend = run.pick("aot_eager", "inductor")
    if run.full and run.on_cpu and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise NotRunError("the inductor needs a C++ compiler on the CPU, and there is none")
    task = Task(run, "no")
    eager, found = plain_loop(task), our_loop(task, dynamo_backend=backend)
    largest = max(eager.losses)
    worst = max(abs(a - b) for a, b in zip(eager.losses, found.losses, strict=True)) / largest
    note = f"of the losses, relative to the largest; backend {backend}"
    yield run.within("difference to eager", worst, 1e-3, "", note)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    yield Figure("graphs", graphs, "", "≥ 1", graphs >= 1, "compiled at all; no fallback to eager")


@pytest.mark.gpu(small_on_cpu=True)
@pytest.mark.parametrize("precision", DTYPES)
def test_train(precision, judge):
    judge(equal, precision)


@pytest.mark.gpu(small_on_cpu=True)
def test_fp16_overflow(judge):
    judge(overflow)


@pytest.mark.gpu(small_on_cpu=True)
def test_compile(judge):
    judge(compiled, seconds=120)
