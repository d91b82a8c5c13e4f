"""Datasets that keep their own position: asked for it after each batch, in worker processes as well.

Such a dataset has `state_dict()` and `load_state_dict()`. In a worker only the collate function runs beside it, so that
reports the position with each batch; a new worker loads it before it begins to read.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader, get_worker_info

from accel_train.data.iterable import IterableDatasetShard
from accel_train.data.reading_random_states import ReadingStates, read_with
from accel_train.data.rng_replay import Randomness, generators_of
from accel_train.data.torch_iterator import torch_iterator
from accel_train.data.workers import Noted, RecordRngState, RestoreWorkerRng, WithoutNotes

__all__ = ["Positions", "StatefulShard", "is_position", "is_stateful", "read_with_positions"]

_FORMAT = 1


def is_stateful(dataset: Any) -> bool:
    """Whether a dataset keeps its own position, exactly."""
    return (
        callable(getattr(dataset, "state_dict", None))
        and callable(getattr(dataset, "load_state_dict", None))
        and not _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))
    )


def _has_shuffle_buffer(examples: Any) -> bool:
    """Whether a stream of Hugging Face's datasets shuffles in a buffer, whose content its state does not hold.

    It would be filled with later samples, so that others come next and those in the buffer never.
    """
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return any(_has_shuffle_buffer(part) for part in inner)


def is_position(state: Any) -> bool:
    """Whether a saved state is one of `Positions`, in a form that this version reads."""
    return isinstance(state, Mapping) and state.get("format") == _FORMAT


class _Note:
    """What a worker reports with a batch; a class of its own, so that torch's pinning does not look inside."""

    __slots__ = ("dataset", "rng", "worker")

    def __init__(self, worker: int, dataset: Any, rng: Any) -> None:
        self.worker, self.dataset, self.rng = worker, dataset, rng


class _RecordPosition:
    """A collate function that reports the position of the worker's dataset; runs in workers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = RecordRngState(collate)

    def __call__(self, samples: Any) -> Noted:
        batch, rng = self._collate(samples)
        info: Any = get_worker_info()
        # The queue pickles later, when the dataset may have moved on.
        return Noted(batch, _Note(info.id, copy.deepcopy(info.dataset.state_dict()), rng))


class _LoadPosition:
    """A worker's initialisation: the user's own, then the position to begin at."""

    def __init__(self, states: Mapping[int, Any], then: Any) -> None:
        self._states, self._then = states, then

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        if worker in self._states:
            info: Any = get_worker_info()
            info.dataset.load_state_dict(copy.deepcopy(self._states[worker]["dataset"]))


class Positions:
    """The position of one iteration's dataset, after the batches that were taken from its source.

    Args:
        dataset: the dataset, if it is read in this process; else None.
        workers: number of worker processes.
        begin: the state that the iteration began with.
    """

    def __init__(self, dataset: Any, workers: int, begin: Mapping[str, Any] | None) -> None:
        self._dataset = dataset
        self._workers = workers
        self._begin = begin
        self._states: dict[int, Any] = {} if begin is None else dict(begin["states"])
        self._turn = 0 if begin is None else int(begin["turn"])
        self._read = False

    def taken(self, note: _Note | None) -> None:
        """A batch was taken; in a worker, with this note."""
        self._read = True
        if note is not None:
            rng = self._states.get(note.worker, {}).get("rng") if note.rng is None else note.rng
            self._states[note.worker] = {"dataset": note.dataset, "rng": rng}
            self._turn = (note.worker + 1) % self._workers

    def now(self) -> dict[str, Any] | None:
        """The position, as plain data and tensors; None at the beginning of the epoch."""
        if not self._read:
            return None if self._begin is None else dict(self._begin)
        states = self._states
        if self._dataset is not None:
            states = {0: {"dataset": copy.deepcopy(self._dataset.state_dict()), "rng": None}}
        return {
            "format": _FORMAT,
            "workers": self._workers,
            "turn": self._turn,
            "states": {worker: state | {"rng": _tree(state["rng"])} for worker, state in states.items()},
        }


def _tree(rng: Any) -> Any:
    return rng if rng is None or isinstance(rng, Mapping) else rng.tree()


def read_with_positions(
    loader: DataLoader[Any],
    state: Mapping[str, Any] | None,
    turned: bool,
    draws: ReadingStates | None,
    replaced: Mapping[str, Any],
) -> tuple[Iterator[Any], Positions]:
    """Torch's iterator over a dataset that keeps its own position, and what tells that position.

    Args:
        loader: the prepared loader.
        state: where to begin; None: at the beginning.
        turned: workers that run since an earlier epoch have taken the places of others.
        draws: random states with which the dataset is read in this process.
        replaced: attributes in the place of the loader's own; see `torch_iterator`.
    """
    count, dataset = loader.num_workers, cast(Any, loader.dataset)
    if not count:
        if state is not None:
            dataset.load_state_dict(copy.deepcopy(state["states"][0]["dataset"]))
        positions = Positions(dataset, 0, state)
        plain = torch_iterator(loader, replaced)
        if draws is not None:
            read_with(draws, plain)
        return WithoutNotes(map(Noted, plain, itertools.repeat(None)), positions.taken), positions
    if (state is not None or turned) and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None  # new workers begin where these cannot go
    replaced = {**replaced, "collate_fn": _RecordPosition(replaced.get("collate_fn", loader.collate_fn))}
    if state is not None:
        states = dict(state["states"])
        rngs = {worker: saved["rng"] for worker, saved in states.items() if saved["rng"] is not None}
        initialise = _LoadPosition(states, replaced.get("worker_init_fn", loader.worker_init_fn))
        replaced["worker_init_fn"] = RestoreWorkerRng(state["turn"], count, rngs, initialise)
    positions = Positions(None, count, state)
    return WithoutNotes(torch_iterator(loader, replaced), positions.taken), positions


class StatefulShard(IterableDatasetShard):
    """One rank's part of an iterable dataset that keeps its own position.

    The position is the dataset's, which is asked between two global batches.
    """

    _rng_at_start: dict[str, Any] | None = None
    """The generators when the epoch began: its first samples may be read again, for padding."""
    _untouched: Any = None
    """The dataset before it continued somewhere; None in an epoch that is read from its beginning."""
    _continues = False

    def __iter__(self) -> Iterator[Any]:
        if not self._continues:
            draws = _draws_of(self.dataset)
            self._rng_at_start, self._untouched = draws.tree(draws.now()), None
        self._continues = False
        return super().__iter__()

    def first_samples(self, read: list[Any]) -> list[Any]:
        """The samples of the epoch's first global batch; read again if the epoch was continued after it."""
        if self._untouched is None:
            return read
        fresh = copy.deepcopy(self._untouched)
        if hasattr(fresh, "set_epoch"):
            fresh.set_epoch(self.epoch)
        with _draws_of(fresh).as_of(self._rng_at_start):
            return list(itertools.islice(iter(fresh), self.global_batch))

    def state_dict(self) -> dict[str, Any]:
        """The dataset's state, and the generators when the epoch began."""
        return {"dataset": self.dataset.state_dict(), "rng_at_start": self._rng_at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was asked."""
        self._untouched = copy.deepcopy(self.dataset)
        self.dataset.load_state_dict(state["dataset"])
        self._rng_at_start = state["rng_at_start"]
        self._continues = True


def _draws_of(dataset: Any) -> Randomness:
    return Randomness(generators_of([], [dataset]), True)
