"""What one rank pays for one of its batches, at worlds of 1 to 1,024 ranks: ours and Accelerate's.

A rank's share of `BatchSampler(SequentialSampler)` is iterated without any loader, ranks being only numbers here; the
shares are checked to be equal. The second table is what the first batch of a shuffled epoch costs, where the order is
drawn; the last one is the first batch of an epoch from a loader whose workers stay from epoch to epoch, beside
PyTorch's own loader. All contenders run in one process, in turn, round after round; numbers are medians with the range
in brackets.

    hatch run bench:sampler
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measure import flags, installed, quartiles, spread, table, turns
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import accel_train
from accel_train.data import ShardedBatchSampler

BATCH = 8
WORLDS = (1, 2, 8, 64, 1024)
SAMPLES = 1_000_000
Make = Callable[[Any, int], Iterable[list[int]]]


def contenders() -> dict[str, Make]:
    found: dict[str, Make] = {"accel-train": lambda base, world: ShardedBatchSampler(base, world, world - 1)}
    if installed(["accelerate"]):
        from accelerate.data_loader import BatchSamplerShard

        found["accelerate"] = lambda base, world: BatchSamplerShard(base, world, world - 1)
    return found


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
    if installed(["accelerate"]):
        from accelerate import Accelerator

        loaders["accelerate"] = Accelerator(cpu=True).prepare(loader_with_workers())

    def first(loader: Any) -> float:
        time.sleep(0.005)  # workers that just ended their epoch are at rest
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        elapsed = (time.perf_counter() - began) * 1e3
        assert len([*batches]) == 7, "an epoch has eight batches"
        return elapsed

    return turns(
        {name: lambda loader=loader: first(loader) for name, loader in loaders.items()}, rounds, warm=2
    )


def check(makers: dict[str, Make]) -> None:
    for world in WORLDS:
        base = BatchSampler(SequentialSampler(range(world * BATCH * 5 + 3)), BATCH, False)
        shares = [list(make(base, world)) for make in makers.values()]
        assert all(share == shares[0] for share in shares), f"shares differ at world {world}"


def show(title: str, makers: dict[str, Make], rounds: int, once: Callable[[Make, int], float]) -> None:
    calls = {
        (name, world): lambda make=make, world=world: once(make, world)
        for world, (name, make) in itertools.product(WORLDS, makers.items())
    }
    found = turns(calls, rounds)
    rows = [[world, *(spread(found[name, world]) for name in makers)] for world in WORLDS]
    table(["world", *makers], rows, title)


def main() -> None:
    rounds = flags(__doc__, rounds=9).rounds
    torch.set_num_threads(1)
    makers = contenders()
    check(makers)
    # Fewer batches where one of them is expensive for the peer; enough for the clock in every case.
    show(
        "µs per local batch of 8",
        makers,
        rounds,
        lambda make, world: per_batch(make, world, max(256, 4000 // world)),
    )
    show(f"ms to the first batch of a shuffled epoch of {SAMPLES:,} samples", makers, rounds, first_batch)
    found = first_batch_of_workers(rounds * 20)
    title = "ms to the first batch of an epoch, 2 workers that stay: median [quartiles]"
    table(found, [[quartiles(values) for values in found.values()]], title)


if __name__ == "__main__":
    main()
