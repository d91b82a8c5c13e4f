"""What one rank pays for one of its batches, at worlds of 1 to 1,024 ranks: ours and Accelerate's.

A rank's share of `BatchSampler(SequentialSampler)` is iterated without any loader, ranks being only numbers here; the
shares are checked to be equal. The second table is what the first batch of a shuffled epoch costs, where the order is
drawn; the last one is the first batch of an epoch from a loader whose workers stay from epoch to epoch, beside
PyTorch's own loader. All contenders run in one process, in turn, round after round; numbers are medians with the range
in brackets.

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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import accel_train
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


def loader_with_workers() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(8.0 * BATCH).reshape(-1, 1))
    return DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True)


def first_batch_of_workers(rounds: int) -> dict[str, list[float]]:
    """Milliseconds until the first batch of an epoch, the first epochs not counted: those start the workers."""
    loaders = {
        "PyTorch": loader_with_workers(),
        "accel-train": accel_train.Accelerator(cpu=True).prepare(loader_with_workers()),
    }
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate import Accelerator

        loaders["accelerate"] = Accelerator(cpu=True).prepare(loader_with_workers())
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn, (name, loader) in itertools.product(range(rounds + 2), loaders.items()):
        time.sleep(0.005)  # workers that just ended their epoch are at rest
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        elapsed = (time.perf_counter() - began) * 1e3
        assert len([*batches]) == 7, "an epoch has eight batches"
        if turn >= 2:
            times[name].append(elapsed)
    return times


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
    print("\nms to the first batch of an epoch, 2 workers that stay: median [quartiles]\n")
    for name, elapsed in first_batch_of_workers(rounds * 20).items():
        low, middle, high = statistics.quantiles(elapsed, n=4)
        print(f"{name}: {middle:.2f} [{low:.2f}-{high:.2f}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
