"""What a mixture adds to a batch: `MixedDataLoader` against iterating the same prepared loaders in the same order.

Three sources with map-style datasets that return the index, so that reading costs little. The other contender takes the
batches from the three prepared loaders by a list of names that was computed before. All run in one process, in turn,
round after round; microseconds of processor time per batch are medians with the range in brackets. The growth of memory
is that of Python's objects in the second half of the batches, after as many before.

    hatch run bench:mixture
"""

from __future__ import annotations

import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from measure import flags, spread, table, turns
from torch.utils.data import DataLoader, Dataset

from accel_train import Accelerator, DataLoaderConfiguration, MixedDataLoader

WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
LISTED = [(0, WEIGHTS), (10**9, {"web": 0.2, "code": 0.4, "books": 0.4})]
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"weights": WEIGHTS},
    "list": {"weights": LISTED},
    "function": {"weights": lambda step: WEIGHTS},
    "all_exhausted": {"weights": WEIGHTS, "stop": "all_exhausted"},
}


class Indices(Dataset[int]):
    """Nothing to read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def first(samples: list[int]) -> int:
    """No tensor to build."""
    return samples[0]


def loaders(batches: int) -> dict[str, DataLoader[Any]]:
    return {name: DataLoader(Indices(2 * batches), 2, collate_fn=first) for name in WEIGHTS}


def names_of(options: dict[str, Any], batches: int) -> list[str]:
    """The order in which a mixture takes its batches."""
    mixture = MixedDataLoader(loaders(batches), **{"stop": "never"} | options)
    return [mixture.source or "" for _ in itertools.islice(mixture, batches)]


def mixed(options: dict[str, Any], batches: int) -> Callable[[], None]:
    mixture = Accelerator(cpu=True).prepare(MixedDataLoader(loaders(batches), **{"stop": "never"} | options))

    def run() -> None:
        for _ in itertools.islice(mixture, batches):
            pass

    return run


def by_hand(names: list[str], batches: int) -> Callable[[], None]:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    prepared = {name: accelerator.prepare(loader) for name, loader in loaders(batches).items()}

    def run() -> None:
        iterators = {name: iter(loader) for name, loader in prepared.items()}
        for name in names:
            next(iterators[name])

    return run


def elapsed(run: Callable[[], None], batches: int) -> float:
    began = time.process_time()
    run()
    return (time.process_time() - began) / batches * 1e6


def growth(batches: int) -> int:
    """Bytes by which Python's objects grow in `batches` batches, after as many before."""
    mixture = Accelerator(cpu=True).prepare(MixedDataLoader(loaders(2_000), WEIGHTS, stop="never"))
    iterator = iter(mixture)
    tracemalloc.start()
    held = []
    for _ in range(2):
        for _ in itertools.islice(iterator, batches):
            pass
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return held[1] - held[0]


def main() -> None:
    given = flags(__doc__, batches=20_000, rounds=7)
    contenders: dict[str, Callable[[], None]] = {}
    for kind, options in KINDS.items():
        contenders[f"{kind}: mixture"] = mixed(options, given.batches)
        contenders[f"{kind}: by hand"] = by_hand(names_of(options, given.batches), given.batches)
    calls = {name: lambda run=run: elapsed(run, given.batches) for name, run in contenders.items()}
    found = turns(calls, given.rounds, warm=0)
    rows = []
    for kind in KINDS:
        hand, ours = found[f"{kind}: by hand"], found[f"{kind}: mixture"]
        added = statistics.median(ours) - statistics.median(hand)
        rows.append([kind, spread(hand), spread(ours), f"{added:.2f}"])
    table(["µs per batch", "by hand", "mixture", "added"], rows)
    print(f"growth of memory in {given.batches} batches, after as many before: {growth(given.batches)} bytes")


if __name__ == "__main__":
    main()
