"""What one rank pays for one of its batches, at worlds of 1 to 1,024 ranks: ours and Accelerate's.

A rank's share of `BatchSampler(SequentialSampler)` is iterated without any loader, ranks being only numbers here; the
shares are checked to be equal. The second table is what the first batch of a shuffled epoch costs, where the order is
drawn. All contenders run in one process, in turn, round after round; numbers are medians with the range in brackets.

    hatch run bench:sampler
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_train.data import ShardedBatchSampler

BATCH = 8
WORLDS = (1, 2, 8, 64, 1024)
SAMPLES = 1_000_000
Make = Callable[[Any, int], Iterable[list[int]]]


def contenders() -> dict[str, Make]:
    found: dict[str, Make] = {"accel-train": lambda base, world: ShardedBatchSampler(base, world, world - 1)}
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate: NOT RUN, the package is not installed")
        return found
    from accelerate.data_loader import BatchSamplerShard

    return found | {"accelerate": lambda base, world: BatchSamplerShard(base, world, world - 1)}


def per_batch(make: Make, world: int, batches: int) -> float:
    """Microseconds per local batch, the first one not counted."""
    base = BatchSampler(SequentialSampler(range(world * BATCH * (batches + 2))), BATCH, False)
    share = iter(make(base, world))
    next(share)
    began = time.perf_counter()
    for _ in itertools.islice(share, batches):
        pass
    return (time.perf_counter() - began) / batches * 1e6


def first_batch(make: Make, world: int) -> float:
    """Milliseconds until the first batch of a shuffled epoch."""
    base = BatchSampler(RandomSampler(range(SAMPLES)), BATCH, False)
    began = time.perf_counter()
    next(iter(make(base, world)))
    return (time.perf_counter() - began) * 1e3


def check(makers: dict[str, Make]) -> None:
    for world in WORLDS:
        base = BatchSampler(SequentialSampler(range(world * BATCH * 5 + 3)), BATCH, False)
        shares = [list(make(base, world)) for make in makers.values()]
        assert all(share == shares[0] for share in shares), f"shares differ at world {world}"


def measure(
    makers: dict[str, Make], rounds: int, once: Callable[[Make, int], float]
) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {}
    for turn, world, (name, make) in itertools.product(range(rounds + 1), WORLDS, makers.items()):
        elapsed = once(make, world)
        if turn:  # the first round warms up
            times.setdefault((name, world), []).append(elapsed)
    return times


def table(title: str, makers: dict[str, Make], times: dict[tuple[str, int], list[float]]) -> None:
    print(f"\n{title}\n\n| world | {' | '.join(makers)} |\n|---|{'---|' * len(makers)}")
    for world in WORLDS:
        cells = [
            f"{statistics.median(times[name, world]):.2f} "
            f"[{min(times[name, world]):.2f}-{max(times[name, world]):.2f}]"
            for name in makers
        ]
        print(f"| {world} | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    makers = contenders()
    check(makers)
    # Fewer batches where one of them is expensive for the peer; enough for the clock in every case.
    times = measure(makers, rounds, lambda make, world: per_batch(make, world, max(256, 4000 // world)))
    table("µs per local batch of 8", makers, times)
    table(
        f"ms to the first batch of a shuffled epoch of {SAMPLES:,} samples",
        makers,
        measure(makers, rounds, first_batch),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
