"""Grain's datasets as streams of torch's loaders that can save their position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_train.errors import ArgumentTypeError

__all__ = ["GrainDataset"]


class GrainDataset(IterableDataset[Any]):
    """Wraps a `grain.IterDataset` as an iterable dataset for `torch.utils.data.DataLoader`.

    Its position is that of Grain's iterator (`get_state`), so a loader that is prepared with
    `use_stateful_dataloader=True` continues without reading anything again. Each worker process of a loader reads
    everything and keeps every n-th element.

    A `grain.MapDataset` needs no wrapper: torch's loader reads it by index, and shuffles, divides and continues it like
    any map-style dataset.

    Args:
        dataset: an iterable dataset of Grain, or a function of the epoch that returns one, for another order in every
            epoch. The function gets the epoch of the loader, or the last one given to `set_epoch`.

    Raises:
        ArgumentTypeError: `dataset` is neither.
    """

    def __init__(self, dataset: Any) -> None:
        is_map_style = hasattr(dataset, "__getitem__")
        if is_map_style or not (callable(dataset) or hasattr(dataset, "__iter__")):
            advice = (
                "Give it to DataLoader itself, or call its to_iter_dataset()."
                if is_map_style
                else "Build one with grain.MapDataset…to_iter_dataset()."
            )
            raise ArgumentTypeError(
                f"GrainDataset() takes a grain.IterDataset or a function of the epoch that returns one, got "
                f"{type(dataset).__name__}. {advice}"
            )
        self._build: Callable[[int], Any] | None = None if hasattr(dataset, "__iter__") else dataset
        self._dataset: Any = dataset if self._build is None else None
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that are kept see it change
        self._iterator: Any = None
        self._read = 0  # elements, those for other workers included
        self._begin: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch, in worker processes as well."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; prepared loaders call it."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, None
        self._iterator = iter(self._dataset if self._build is None else self._build(self.epoch))
        self._read = 0
        if begin is not None:
            self._iterator.set_state(copy.deepcopy(begin["iterator"]))
            self._read = begin["read"]
        return self._elements(self._iterator)

    def _elements(self, iterator: Any) -> Iterator[Any]:
        worker = get_worker_info()
        place, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for element in iterator:
            mine = self._read % count == place
            self._read += 1
            if mine:
                yield element

    def state_dict(self) -> dict[str, Any]:
        """The state of Grain's iterator, and how many elements were read."""
        if self._begin is not None:
            return copy.deepcopy(self._begin)
        state = None if self._iterator is None else copy.deepcopy(self._iterator.get_state())
        return {"iterator": state, "read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state at the next iteration."""
        self._begin = None if state["iterator"] is None else copy.deepcopy(state)

    def __getstate__(self) -> dict[str, Any]:
        # An iterator, with its threads, stays in its process; a copy is iterated from its beginning, or from what was
        # loaded.
        return self.__dict__ | {"_iterator": None, "_read": 0}
