"""Ours and a peer train in turn, in the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

__all__ = ["seconds_of_steps"]


def seconds_of_steps(
    runs: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    steps: int,
    warm: int = 0,
    rtol: float,
    atol: float,
) -> dict[str, list[float]]:
    """Seconds of a step in every round, by name; checks that "ours" and "torch" have the same losses.

    Args:
        runs: each takes a step, and returns its loss.
        rounds: how often each has its turn; the order changes from one to the next.
        steps: of a turn.
        warm: steps before the first round.
        rtol: of losses.
        atol: of losses.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses = {name: [run() for _ in range(warm)] for name, run in runs.items()}
    for number in range(rounds):
        for name, run in runs.items() if number % 2 else reversed(runs.items()):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                losses[name].append(run())
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / steps)
    torch.testing.assert_close(losses["ours"], losses["torch"], rtol=rtol, atol=atol)
    return seconds
