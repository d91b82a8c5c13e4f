"""Pipelines against the same written by hand, and their bubble against the formulas of their schedules.

Steps: a toy transformer in stages trains on CPU ranks of one thread each, ours and torch's schedule in turn, round
after round; losses are checked to be equal. Bubble: layers that sleep instead of computing, for a fixed time in forward
and twice that in backward, so that the time of a step is the schedule's alone; ours and torch's by hand in turn. What
counts as busy is how long the layers slept, which is longer than they asked for.

    hatch run bench:pipelines
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import flags, median_ratio, same_training, table, turns
from torch import Tensor, nn

from testkit import worlds

WIDTH, LAYERS, TOKENS, ROWS, STEPS = 128, 8, 32, 16, 4


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def model_of(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(LAYERS)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator), torch.randn(
        ROWS, TOKENS, WIDTH, generator=generator
    )


TORCH_S = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
}


def stages_on_a_rank(schedule: str) -> int:
    return 2 if schedule in ("interleaved_1f1b", "looped_bfs") else 1


def by_hand(schedule: str, micro_batches: int, kind: Callable[[], nn.Module] = Block) -> Callable[[], float]:
    """As torch's documentation shows it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, size = dist.get_rank(), dist.get_world_size()
    each = stages_on_a_rank(schedule)
    layers = LAYERS // (size * each)
    model = model_of(kind)
    held = range(rank, size * each, size)
    module = nn.ModuleList(model[index * layers : (index + 1) * layers] for index in held)
    stages: Any = [
        PipelineStage(part, index, size * each, torch.device("cpu"))
        for part, index in zip(module, held, strict=True)
    ]
    schedule_class: Any = get_schedule_class(TORCH_S[schedule])
    run = schedule_class(stages[0] if each == 1 else stages, micro_batches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    x, y = batch()

    def step() -> float:
        losses: list[Tensor] = []
        last = rank == size - 1
        run.step(*([x] if rank == 0 else []), target=y if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad()
        # Every rank learns the loss, as by ours.
        loss = torch.stack(losses).mean().detach() if last else torch.empty(())
        dist.broadcast(loss, size - 1)
        return float(loss)

    return step


def by_ours(schedule: str, micro_batches: int, kind: Callable[[], nn.Module] = Block) -> Callable[[], float]:
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    options = PipelineParallelConfig(
        schedule=schedule, num_micro_batches=micro_batches, loss_function=nn.functional.mse_loss
    )
    parallelism = ParallelismConfig(pp_size=int(os.environ["WORLD_SIZE"]), pp_handler=options)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
    model = model_of(kind)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    )
    x, y = batch()

    def step() -> float:
        with accelerator.accumulate(model):
            loss = model(x, target=y).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def measure_steps(micro_batches: int, rounds: int) -> dict[str, list[float]]:
    from accel_state import PartialState

    PartialState(cpu=True)
    runs = {"torch": by_hand("1f1b", micro_batches), "ours": by_ours("1f1b", micro_batches)}
    return same_training(runs, rounds=rounds, steps=STEPS, rtol=1e-5, atol=1e-6)


slept: list[float] = []
"""Seconds of each sleep of this rank, as the clock has them."""


def _sleep(seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - begin)


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _sleep(2 * ctx.seconds)
        return gradients[0], gradients[0].sum(), None


class Sleeping(nn.Module):
    """A layer that takes a fixed time: so many seconds in forward, and twice that in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Slept.apply(x, self.weight, self.seconds)
        return out


def measure_bubble(schedule: str, micro_batches: int, steps: int, seconds: float) -> dict[str, float]:
    """The share of a step in which this rank waits, ours and by hand in turn."""
    from accel_state import PartialState

    PartialState(cpu=True)
    layer = partial(Sleeping, seconds)
    runs = {
        "ours": by_ours(schedule, micro_batches, layer),
        "torch": by_hand(schedule, micro_batches, layer),
    }

    def waits(name: str) -> float:
        dist.barrier()
        slept.clear()
        begin = time.perf_counter()
        runs[name]()
        dist.barrier()  # a rank whose stages are done waits for those of the others
        return 1 - sum(slept) / (time.perf_counter() - begin)

    shares = turns({name: lambda name=name: waits(name) for name in runs}, steps)
    return {name: statistics.median(values) for name, values in shares.items()}


def formula(schedule: str, ranks: int, micro_batches: int) -> float:
    """The bubble's share: of GPipe and 1F1B (p - 1) / (m + p - 1); with v stages on a rank (p - 1) / (v m + p - 1)."""
    return (ranks - 1) / (stages_on_a_rank(schedule) * micro_batches + ranks - 1)


def main() -> None:
    given = flags(
        __doc__,
        rounds=15,
        parts=["steps", "bubble"],
        ranks=[2, 4],
        schedules=list(TORCH_S),
        steps=5,
        seconds=0.03,
    )
    if "steps" in given.parts:
        rows = []
        for ranks in given.ranks:
            found = worlds.run(measure_steps, ranks, 8, given.rounds, timeout=600)[0]
            ms = [f"{1e3 * statistics.median(found[name]):.1f}" for name in ("torch", "ours")]
            rows.append([ranks, *ms, f"{median_ratio(found['ours'], found['torch']):.3f}"])
        table(["ranks", "torch's 1F1B, ms", "ours, ms", "ratio"], rows, "A step of 8 micro-batches")
    if "bubble" in given.parts:
        rows = []
        for ranks, schedule in itertools.product(given.ranks, given.schedules):
            if ranks == 4 and schedule in ("gpipe", "looped_bfs"):
                continue
            found = worlds.run(measure_bubble, ranks, schedule, 8, given.steps, given.seconds, timeout=600)
            means = [f"{statistics.mean(each[name] for each in found):.3f}" for name in ("ours", "torch")]
            rows.append([schedule, ranks, *means, f"{formula(schedule, ranks, 8):.3f}"])
        title = "The share of a step that waits, 8 micro-batches"
        table(["schedule", "ranks", "ours", "torch's by hand", "by the formula"], rows, title)


if __name__ == "__main__":
    main()
