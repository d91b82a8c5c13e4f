"""What a step of Muon costs: one process against torch.optim.Muon, and two ranks that share the work out.

The matrices are those of a transformer's blocks; gradients are random, and only `step()` is timed. Contenders take
turns, round after round: medians in ms, and the ratio to the first. On two gloo ranks with copies (as ddp) the
contenders are ours and ours with divide_work=False, where every rank computes everything.

    hatch run bench:muon
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import flags, turns
from torch import nn

from accel_state.world.process import PartialState
from accel_train import MuonWithAdamW
from testkit import worlds


def matrices(width: int, blocks: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    found = [nn.Parameter(torch.randn(shape)) for _ in range(blocks) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def timed(
    contenders: dict[str, torch.optim.Optimizer], rounds: int, ready: Callable[[], object]
) -> dict[str, float]:
    """Milliseconds of a step; the first round plans and makes states, and does not count."""

    def step(optimizer: torch.optim.Optimizer) -> float:
        ready()
        began = time.perf_counter()
        optimizer.step()
        ready()
        return 1000 * (time.perf_counter() - began)

    calls = {name: lambda optimizer=optimizer: step(optimizer) for name, optimizer in contenders.items()}
    return {name: statistics.median(values) for name, values in turns(calls, rounds).items()}


def alone(width: int, blocks: int, rounds: int) -> dict[str, float]:
    options = {"lr": 0.02, "adjust_lr_fn": "original"}
    contenders = {
        "torch.optim.Muon": torch.optim.Muon(matrices(width, blocks), **options),
        "ours": MuonWithAdamW(matrices(width, blocks), **options),
    }
    return timed(contenders, rounds, lambda: None)


def shared(width: int, blocks: int, rounds: int) -> dict[str, float]:
    PartialState()
    group = dist.group.WORLD
    contenders = {
        "every rank computes all": MuonWithAdamW(matrices(width, blocks), group=group, divide_work=False),
        "ours": MuonWithAdamW(matrices(width, blocks), group=group),
    }
    return timed(contenders, rounds, dist.barrier)


def main() -> None:
    given = flags(__doc__, width=1024, blocks=4, rounds=5)
    size = (given.width, given.blocks, given.rounds)
    for title, ranks, function in (("one process", 1, alone), ("two ranks", 2, shared)):
        found = worlds.run(function, ranks, *size, timeout=3600.0)[0]
        first = next(iter(found.values()))
        for name, value in found.items():
            print(f"{title:12} {name:24} {value:9.1f} ms  {value / first:5.2f}")


if __name__ == "__main__":
    main()
