"""Worker processes: the random numbers that they draw, over a restart; and their end.

A worker reports the states of its generators with a batch when they have changed. After a restart each new worker takes
the place of an old one: workers return batches in turn, and the turn continues where it was.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_state.seeding import numpy_state, numpy_state_tree, python_state, python_state_tree

__all__ = [
    "Ending",
    "Noted",
    "RecordRngState",
    "RestoreWorkerRng",
    "ShowDataset",
    "WithoutNotes",
    "WorkerStates",
    "dataset_with_epoch",
    "end_workers_with",
]

Ending: TypeAlias = "weakref.finalize[[Any, int], Any]"


class _States:
    """The generators of a worker; a separate class, so that torch's pinning does not look inside."""

    __slots__ = ("numpy", "python", "torch")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state(legacy=False)
        self.torch = torch.get_rng_state().numpy().tobytes()  # bytes, which need no shared memory

    def same(self, other: _States | None) -> bool:
        return (
            other is not None
            and self.torch == other.torch
            and self.python == other.python
            and self.numpy["state"]["pos"] == other.numpy["state"]["pos"]
            and bool(np.array_equal(self.numpy["state"]["key"], other.numpy["state"]["key"]))
        )

    def tree(self) -> dict[str, Any]:
        return {
            "python": python_state_tree(self.python),
            "numpy": numpy_state_tree(self.numpy),
            "torch": torch.frombuffer(bytearray(self.torch), dtype=torch.uint8),
        }


class Noted(NamedTuple):
    """A batch, and what a worker reports with it; a named tuple, because torch's pinning thread looks inside those."""

    batch: Any
    note: Any


class RecordRngState:
    """A collate function that reports the generators, or None if they are as after its last batch; runs in workers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: _States | None = None

    def __call__(self, samples: Any) -> Noted:
        """Collate, and add the states if they have changed."""
        batch = self._collate(samples)
        states = _States()
        if states.same(self._last):
            return Noted(batch, None)
        self._last = states
        return Noted(batch, states)


class WorkerStates:
    """The generators of the workers of one iteration, as they reported them.

    Args:
        count: number of workers.
        ahead: how many batches can be read and not yet returned.
        turn: which worker's turn it is; workers count as in the run that was never interrupted.
        states: the states of workers that are known already.
    """

    def __init__(self, count: int, ahead: int, turn: int = 0, states: dict[int, Any] | None = None) -> None:
        self.count = count
        self._ahead = ahead
        self._turn = turn
        self._states: dict[int, Any] = dict(states or {})
        self._read = 0
        self._recent: deque[tuple[int, int, _States | None]] = deque()

    def record(self, states: _States | None) -> None:
        """The next batch was read, with these states after it."""
        self._recent.append((self._read, (self._turn + self._read) % self.count, states))
        self._read += 1
        self._settle(self._read - self._ahead, self._states)

    def _settle(self, handed_out: int, known: dict[int, Any]) -> None:
        while self._recent and self._recent[0][0] < handed_out:
            _, worker, states = self._recent.popleft()
            if states is not None:
                known[worker] = states

    def dump(self, handed_out: int) -> dict[str, Any]:
        """The states after this number of batches, as plain data and tensors."""
        known = dict(self._states)
        known |= {
            w: states for number, w, states in self._recent if number < handed_out and states is not None
        }
        trees = {w: states.tree() if isinstance(states, _States) else states for w, states in known.items()}
        return {"count": self.count, "turn": (self._turn + handed_out) % self.count, "states": trees}


class WithoutNotes:
    """Torch's iterator without what workers report, which `record` is called with."""

    def __init__(self, source: Iterator[Any], record: Callable[[Any], None]) -> None:
        self._source = source
        self._record = record

    def __iter__(self) -> WithoutNotes:
        return self

    def __next__(self) -> Any:
        batch, note = next(self._source)
        self._record(note)
        return batch


class RestoreWorkerRng:
    """A worker's initialisation: take the place of the worker whose turn it is, with its generators.

    Args:
        turn: the worker whose turn it is.
        count: number of workers.
        states: their generators, of those that have drawn.
        then: the user's own initialisation.
    """

    def __init__(self, turn: int, count: int, states: dict[int, Any], then: Any) -> None:
        self._turn, self._count, self._states, self._then = turn, count, states, then

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker."""
        acting = (worker_id + self._turn) % self._count
        info = get_worker_info()
        assert info is not None, "runs in a worker"
        base = info.seed - worker_id
        # As torch seeds a worker (torch/utils/data/_utils/worker.py).
        random.seed(base + acting)
        torch.manual_seed(base + acting)
        np.random.seed(torch_worker._generate_state(base, acting))  # type: ignore[no-untyped-call]
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=acting, num_workers=info.num_workers, seed=base + acting, dataset=info.dataset
        )
        if self._then is not None:
            self._then(acting)
        states = self._states.get(acting)
        if states is not None:
            random.setstate(python_state(states["python"]))
            np.random.set_state(numpy_state(states["numpy"], np.random.get_state(legacy=False)))
            torch.set_rng_state(states["torch"])


class _MapWithEpoch(Dataset[Any]):
    """A dataset in a worker that stays over several epochs: it hears of each one before it is read.

    Args:
        dataset: it has ``set_epoch``, and was told the epoch in which the worker starts.
        epoch: the number of the epoch, in shared memory.
    """

    def __init__(self, dataset: Any, epoch: torch.Tensor) -> None:
        self.dataset = dataset
        self._epoch = epoch
        self._told = int(epoch)

    def now(self) -> Any:
        """The dataset, in the present epoch."""
        epoch = int(self._epoch)
        if epoch != self._told:
            self.dataset.set_epoch(epoch)
            self._told = epoch
        return self.dataset

    def __getitem__(self, index: Any) -> Any:
        return self.now()[index]

    def __getitems__(self, indices: Any) -> Any:
        dataset = self.now()
        fetch = getattr(dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


class _StreamWithEpoch(IterableDataset[Any]):
    """The same for a stream, which begins again in every epoch."""

    def __init__(self, dataset: Any, epoch: torch.Tensor) -> None:
        self._map = _MapWithEpoch(dataset, epoch)

    @property
    def dataset(self) -> Any:
        """The stream itself."""
        return self._map.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._map.now())


def dataset_with_epoch(dataset: Any, epoch: torch.Tensor) -> Dataset[Any]:
    """A dataset for workers that stay over several epochs.

    Args:
        dataset: it has ``set_epoch``.
        epoch: the number of the epoch: int64, one element, in shared memory.
    """
    kind = _StreamWithEpoch if isinstance(dataset, IterableDataset) else _MapWithEpoch
    return kind(dataset, epoch)


class ShowDataset:
    """A worker's initialisation that shows it the dataset itself, in the place of one by `dataset_with_epoch`."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker."""
        info: Any = get_worker_info()
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset
        )
        if self._then is not None:
            self._then(worker_id)


def end_workers_with(loader: Any, iterator: Any, last: Ending | None) -> Ending | None:
    """End the workers of the iterator that a loader keeps, once the loader is gone.

    Torch's iterator does so itself, unless the garbage collector finds it together with its queues, as in a prepared
    loader that an `Accelerator` knows: then the queues are closed first, the workers never get the message, and the
    iterator waits 5 seconds for each of them.

    Args:
        loader: a data loader.
        iterator: torch's, which does not refer to the loader.
        last: the answer for the previous iterator, which ends its own workers if it is another one.
    """
    if last is not None:
        known = last.peek()
        if known is not None and known[2][0] is iterator:
            return last
        last.detach()
    if not getattr(iterator, "_workers", None):
        return None
    ending: Ending = weakref.finalize(loader, _end_workers, iterator, os.getpid())
    ending.atexit = False  # torch itself ends workers when the program ends
    return ending


def _end_workers(iterator: Any, process: int) -> None:
    if os.getpid() == process:  # not in a worker, which has a copy of everything
        iterator._shutdown_workers()
