"""Datasets that keep their own position, read by torchdata's `StatefulDataLoader`.

Such a dataset has `state_dict()` and `load_state_dict()`. In worker processes only torchdata's loader can ask it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_state.errors import NotAvailableError
from accel_train.data.iterable import IterableDatasetShard
from accel_train.data.rng_replay import Randomness, generators_of
from accel_train.data.sampling.samplers import loader_options

__all__ = ["StatefulReader", "StatefulShard", "is_stateful", "loader_class"]


def is_stateful(dataset: Any) -> bool:
    """Whether a dataset keeps its own position."""
    return callable(getattr(dataset, "state_dict", None)) and callable(
        getattr(dataset, "load_state_dict", None)
    )


def loader_class(dataset: Any) -> Any:
    """Torchdata's loader.

    Raises:
        NotAvailableError: torchdata is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise NotAvailableError(
            f"use_stateful_dataloader=True with a dataset that has state_dict() ({type(dataset).__name__}) needs "
            'torchdata, which is not installed. Run: pip install "accel-train[stateful]"'
        ) from error
    return StatefulDataLoader


class StatefulReader:
    """Torchdata's loader in place of torch's iterator.

    Args:
        dataset: a dataset that keeps its own position.

    Raises:
        NotAvailableError: torchdata is not installed.
    """

    def __init__(self, dataset: Any) -> None:
        self._kind = loader_class(dataset)
        self.loader: Any = None

    @property
    def keeps_workers(self) -> bool:
        """Whether there are worker processes from an earlier epoch."""
        return self.loader is not None and self.loader._iterator is not None

    def iterate(self, loader: DataLoader[Any], indexes: Any, state: dict[str, Any] | None) -> Iterator[Any]:
        """An iterator over what `loader` reads.

        Args:
            loader: the prepared loader.
            indexes: the batches of indices of a map-style dataset, or single indices; None for a stream.
            state: where to begin; None: at the beginning.
        """
        if self.loader is None or not loader.persistent_workers:
            options = loader_options(loader)
            if indexes is None:
                options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            elif loader._auto_collation:
                options |= {"batch_sampler": indexes}
            else:
                options |= {"batch_size": None, "sampler": indexes}
            self.loader = self._kind(loader.dataset, snapshot_every_n_steps=1, **options)
        if state is not None:
            self.loader.load_state_dict(state)
        iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def asker(self) -> Callable[[], dict[str, Any]]:
        """What answers with the position of the iterator that was made last."""
        reading = self.loader
        return lambda: copy.deepcopy(reading.state_dict())


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
