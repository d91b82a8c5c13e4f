"""Pipelines against the same written by hand, and their bubble against the formulas of their schedules.

Steps: a toy transformer in stages trains on CPU ranks of one thread each, ours and torch's schedule in turn, round
after round; losses are checked to be equal. Bubble: layers that sleep instead of computing, for a fixed time in forward
and twice that in backward, so that the time of a step is the schedule's alone.

    hatch run bench:pipelines
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from turns import seconds_of_steps

from testkit import worlds

WIDTH, LAYERS, TOKENS, ROWS, STEPS = 128, 8, 32, 16, 4
SLEEP = 0.03  # seconds of a layer's forward


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


def by_hand(schedule: str, micro_batches: int) -> Callable[[], float]:
    """As torch's documentation shows it, with one stage on each rank."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, size = dist.get_rank(), dist.get_world_size()
    layers = LAYERS // size
    module = model_of(Block)[rank * layers : (rank + 1) * layers]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    kind = get_schedule_class(schedule)
    run = kind(stage, micro_batches, loss_fn=nn.functional.mse_loss)
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
    runs = {"torch": by_hand("1F1B", micro_batches), "ours": by_ours("1f1b", micro_batches)}
    return seconds_of_steps(runs, rounds=rounds, steps=STEPS, rtol=1e-5, atol=1e-6)


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(SLEEP)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * SLEEP)
        return gradients[0], gradients[0].sum()


class Sleeping(nn.Module):
    """A layer that takes a fixed time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Slept.apply(x, self.weight)
        return out


def measure_bubble(schedule: str, micro_batches: int, steps: int) -> float:
    """The share of a step in which a rank waits."""
    step = by_ours(schedule, micro_batches, Sleeping)
    step()  # sees the shapes
    seconds = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    busy = 3 * SLEEP * LAYERS / dist.get_world_size() * micro_batches
    return 1 - busy / statistics.median(seconds)


def formula(schedule: str, ranks: int, micro_batches: int) -> float:
    """The bubble's share: of GPipe and 1F1B (p - 1) / (m + p - 1); with v stages on a rank (p - 1) / (v m + p - 1)."""
    stages = 2 if schedule in ("interleaved_1f1b", "looped_bfs") else 1
    return (ranks - 1) / (stages * micro_batches + ranks - 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=("steps", "bubble"), default=["steps", "bubble"])
    arguments = parser.parse_args()
    if "steps" in arguments.parts:
        for ranks in (2, 4):
            found = worlds.run(measure_steps, ranks, 8, arguments.rounds, timeout=600)[0]
            ratio = statistics.median(o / t for o, t in zip(found["ours"], found["torch"], strict=True))
            print(
                f"1f1b, {ranks} ranks, 8 micro-batches: torch {statistics.median(found['torch']) * 1e3:.1f} ms, ours "
                f"{statistics.median(found['ours']) * 1e3:.1f} ms, {ratio:.3f}x"
            )
    if "bubble" in arguments.parts:
        for ranks in (2, 4):
            for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
                if ranks == 4 and schedule in ("gpipe", "looped_bfs"):
                    continue
                found = worlds.run(measure_bubble, ranks, schedule, 8, 5, timeout=600)
                print(
                    f"bubble of {schedule}, {ranks} ranks, 8 micro-batches: {statistics.mean(found):.3f}, by its "
                    f"formula {formula(schedule, ranks, 8):.3f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
