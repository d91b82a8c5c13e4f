"""What a step costs over plain PyTorch where a step takes the device milliseconds, and how much memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit.figures import Figure, Run
from testkit.gpt import GPT, next_token_loss, random_ids

OF_PLAIN = 1.01
LEAST_STEP_SECONDS = 0.005


class Interleaved:
    """Two loops take turns, round after round, so that both see the same machine."""

    def __init__(self, run: Run, plain: Callable[[], object], ours: Callable[[], object], steps: int) -> None:
        self.run = run
        self.plain: list[float] = []
        self.ours: list[float] = []
        rounds = run.pick(3, 15)
        for number in range(rounds + 1):
            turns = [(plain, self.plain), (ours, self.ours)]
            for call, times in turns if number % 2 else reversed(turns):
                spent = run.seconds(lambda call=call: [call() for _ in range(steps)]) / steps  # type: ignore[misc]
                if number:  # the first round warms up
                    times.append(spent)

    def figure(self, unit_of: str) -> Figure:
        """The ratio, judged."""
        ratios = [mine / base for mine, base in zip(self.ours, self.plain, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        note = (
            f"quartiles {low:.4f} to {high:.4f}; {statistics.median(self.ours) * 1e3:.4g} ms {unit_of} against "
            f"{statistics.median(self.plain) * 1e3:.4g} ms"
        )
        return self.run.at_most("step over plain PyTorch", statistics.median(ratios), OF_PLAIN, "x", note)


def step(run: Run) -> Iterator[Figure]:
    """Float32, with a scheduler; the batch grows until a step takes 5 ms."""
    width = run.pick(16, 2048)

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(6)]
        model = nn.Sequential(*layers).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    model, optimizer, scheduler = parts()
    batch = torch.randn(run.pick(4, 256), width, device=run.device)

    def plain() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    while run.judged and run.median_seconds(plain, 5) < 1.5 * LEAST_STEP_SECONDS:
        batch = torch.randn(2 * len(batch), width, device=run.device)
    model, optimizer, scheduler = parts()  # as new, like ours
    accelerator = run.accelerator()
    mine, my_optimizer, my_scheduler = accelerator.prepare(*parts())

    def ours() -> None:
        accelerator.backward(mine(batch).square().mean())
        my_optimizer.step()
        my_scheduler.step()
        my_optimizer.zero_grad()

    measured = Interleaved(run, plain, ours, run.pick(2, 20))
    different = sum(
        not torch.equal(*pair) for pair in zip(model.parameters(), mine.parameters(), strict=True)
    )
    yield run.exact("weights unlike those of plain PyTorch", different, 0, "", "after all rounds")
    yield measured.figure("a step")


def gpt(run: Run) -> Iterator[Figure]:
    """A decoder of 12 layers and 768 features on 512 tokens, in bfloat16."""
    layers, width, heads, vocabulary, length, rows = run.pick(
        (2, 16, 2, 64, 16, 2), (12, 768, 12, 50304, 512, 16)
    )
    ids = random_ids(rows, length, vocabulary).to(run.device)

    def parts() -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT(layers, width, heads, vocabulary, length).to(run.device)
        return model, torch.optim.AdamW(model.parameters(), lr=run.pick(1e-2, 1e-4))

    accelerator = run.accelerator(mixed_precision="bf16")
    model, optimizer = parts()
    mine, my_optimizer = accelerator.prepare(*parts())
    losses: dict[str, list[Tensor]] = {"plain": [], "ours": []}

    def plain() -> None:
        with torch.autocast(run.device.type, torch.bfloat16):
            logits = model(ids)
        logits = logits.float()  # as a prepared model answers
        loss = next_token_loss(logits, ids)
        losses["plain"].append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        loss = next_token_loss(mine(ids), ids)
        losses["ours"].append(loss.detach())
        accelerator.backward(loss)
        my_optimizer.step()
        my_optimizer.zero_grad()

    plain(), ours()  # make the optimizers' states, which both peaks include
    peaks = []
    for loop in (plain, ours):
        with run.peak_memory() as peak:
            loop()
        peaks += peak
    measured = Interleaved(run, plain, ours, run.pick(2, 5))
    first, last = float(losses["ours"][0]), float(losses["ours"][-1])
    apart = max(
        abs(float(a) - float(b)) for a, b in zip(losses["plain"][:4], losses["ours"][:4], strict=True)
    )
    yield run.within("difference of the first losses", apart / first, 1e-3, "", "to plain PyTorch, relative")
    yield run.within("last loss over first", last / first, 0.99)
    yield measured.figure("a step")
    rate, plain_rate = (rows * length / statistics.median(times) for times in (measured.ours, measured.plain))
    yield Figure("rate", rate, "tokens/s", note=f"plain PyTorch {plain_rate:.4g}")
    if peaks:
        theirs, own = peaks
        note = f"{own / 1e6:.0f} MB against {theirs / 1e6:.0f} MB, both with the parameters and states of both loops"
        yield run.at_most("peak memory over plain PyTorch", own / theirs, OF_PLAIN, "x", note)


@pytest.mark.gpu(small_on_cpu=True)
def test_step(judge):
    judge(step)


@pytest.mark.gpu(small_on_cpu=True)
def test_gpt_bf16(judge):
    judge(gpt)
