"""Equal random numbers for ranks that read the same samples.

Ranks that differ only in tensor, pipeline, context or sequence parallelism have one batch index and must augment alike,
while the model's own draws (dropout) stay independent. So reading uses separate random states, which follow from one
seed of the epoch and the batch index. They replace the process's states while something is read.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch

from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.shared_seed import Sharing
from accel_train.ranks import Ranks

__all__ = ["ReadingSource", "SharedReading", "begin_shared_reading"]


class SharedReading:
    """Random states of Python, NumPy and torch (on the host) for reading; inside the context they are in use.

    Not reentrant.

    Args:
        seed: what the states follow from; also the seed of worker processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._globals = Randomness([], everything=True)
        mine = self._globals.now()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed accelerators, too
        self._states = self._globals.now()
        self._globals.put_back(mine)
        self._outside: Any = None

    def __enter__(self) -> SharedReading:
        self._outside = self._globals.now()
        self._globals.put_back(self._states)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states = self._globals.now()
        self._globals.put_back(self._outside)
        self._outside = None

    def worker_generator(self) -> torch.Generator:
        """A generator from which torch draws the base seed of worker processes."""
        return torch.Generator().manual_seed(self.seed)

    def tree(self) -> dict[str, Any]:
        """The states, as a tree of tensors and plain data."""
        return self._globals.tree(self._states)

    def load(self, tree: dict[str, Any]) -> None:
        """Set the states to what `tree` returned."""
        with self._globals.as_of(tree):
            self._states = self._globals.now()


class ReadingSource:
    """An iterator whose items are read with the shared states."""

    def __init__(self, source: Iterator[Any], reading: SharedReading) -> None:
        self._source = source
        self._reading = reading

    def __iter__(self) -> ReadingSource:
        return self

    def __next__(self) -> Any:
        with self._reading:
            return next(self._source)


def begin_shared_reading(
    randomness: Randomness, generator: torch.Generator | None, sharing: Sharing, ranks: Ranks
) -> SharedReading:
    """The states for an epoch that begins. Collective: all ranks of the world call it.

    Draws the seed that torch's iterator would draw at this place, so the model's generators move as far as on one
    process. The loader's own generators get the states that they have on the first rank of this index.

    Args:
        randomness: the loader's own generators.
        generator: the loader's `generator`.
        sharing: makes random draws equal on all ranks.
        ranks: the ranks that read different samples.
    """
    if randomness.own:
        randomness.set_own(sharing.of_index(randomness.own_trees(), ranks))
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    text = f"{sharing.integer(drawn)} {ranks.index}"
    return SharedReading(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
