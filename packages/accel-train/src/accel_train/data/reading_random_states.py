"""Random states of their own for reading: equal on ranks that read the same samples, different on all others.

Ranks that differ only in tensor, pipeline, context or sequence parallelism have one batch index and must augment alike,
while the model's own draws (dropout) stay independent. Ranks that read different samples must augment differently, also
where the script gave all of them one seed; and their global generators must stay alike then, since scripts let them
decide what all ranks do together. So reading uses separate random states, which follow from a seed of the epoch and
the batch index. They replace the process's states while something is read.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.shared_seed import Sharing
from accel_train.ranks import Ranks

__all__ = [
    "ReadingSource",
    "ReadingStates",
    "begin_own_reading",
    "begin_shared_reading",
    "may_draw",
    "read_with",
]


class ReadingStates:
    """Random states of Python, NumPy and torch (on the host) for reading; inside the context they are in use.

    Not reentrant.

    Args:
        seed: what the states follow from; also the seed of worker processes.
    """

    def __init__(self, seed: int) -> None:
        self.worker_generator = torch.Generator().manual_seed(seed)
        """From it torch draws the base seed of worker processes."""
        self.seed = seed
        self._numpy = np.random.MT19937(seed & 0xFFFFFFFF)
        self._states: tuple[Any, torch.Tensor] | None = None  # Python's and torch's; None: not seeded yet
        self._outside: Any = None

    def __enter__(self) -> ReadingStates:
        # NumPy's generator is exchanged: to copy its state takes five times as long as those of the other two.
        self._outside = random.getstate(), _numpy.get_bit_generator(), torch.get_rng_state()
        _numpy.set_bit_generator(self._numpy)
        if self._states is None:
            random.seed(self.seed)
            np.random.seed(self.seed & 0xFFFFFFFF)
            torch.default_generator.manual_seed(self.seed)  # torch.manual_seed would seed accelerators, too
        else:
            random.setstate(self._states[0])
            torch.set_rng_state(self._states[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states = random.getstate(), torch.get_rng_state()
        python, numpy, of_torch = self._outside
        self._outside = None
        random.setstate(python)
        _numpy.set_bit_generator(numpy)
        torch.set_rng_state(of_torch)

    def tree(self) -> dict[str, Any]:
        """The states, as a tree of tensors and plain data."""
        with self:
            return _GLOBALS.tree(_GLOBALS.now())

    def load(self, tree: dict[str, Any]) -> None:
        """Set the states to what `tree` returned."""
        with self, _GLOBALS.as_of(tree):
            states = _GLOBALS.now()
        with self:
            _GLOBALS.put_back(states)


_numpy: Any = np.random  # its types leave out what exchanges the generator
_GLOBALS = Randomness([], everything=True)


class ReadingSource:
    """An iterator whose items are read with the shared states."""

    def __init__(self, source: Iterator[Any], reading: ReadingStates) -> None:
        self._source = source
        self._reading = reading

    def __iter__(self) -> ReadingSource:
        return self

    def __next__(self) -> Any:
        with self._reading:
            return next(self._source)


@dataclass(frozen=True, slots=True)
class _Fetcher:
    """Torch's fetcher of batches, with separate random states; which samples are fetched is drawn outside of them."""

    fetcher: Any
    """Torch's."""
    states: ReadingStates
    """For the dataset and the collate function."""

    def fetch(self, indices: Any) -> Any:
        """Fetch one batch."""
        with self.states:
            return self.fetcher.fetch(indices)


def read_with(states: ReadingStates, iterator: Any) -> None:
    """Let torch's iterator, which reads in this process, fetch batches with these states."""
    iterator._dataset_fetcher = _Fetcher(iterator._dataset_fetcher, states)


def may_draw(dataset: Any, collate: Any) -> bool:
    """Whether reading may draw random numbers: whether it runs other code than torch's own."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) not in (TensorDataset, list, tuple, range) or collate not in (
        default_collate,
        default_convert,
    )


def begin_own_reading(generator: torch.Generator | None, ranks: Ranks) -> ReadingStates:
    """The states of a rank that reads samples which no other rank reads, for an epoch that begins.

    Draws the seed that torch's iterator would draw at this place.

    Args:
        generator: the loader's `generator`.
        ranks: the ranks that read different samples.
    """
    return ReadingStates(_seed(_draw(generator), ranks.index))


def begin_shared_reading(
    randomness: Randomness, generator: torch.Generator | None, sharing: Sharing, ranks: Ranks
) -> ReadingStates:
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
    return ReadingStates(_seed(sharing.integer(_draw(generator)), ranks.index))


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _seed(drawn: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{drawn} {index}".encode()).digest()[:8], "big") >> 1
