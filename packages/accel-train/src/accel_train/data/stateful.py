"""Datasets that say themselves where they are, read by torchdata's `StatefulDataLoader`.

Such a dataset has `state_dict()` and `load_state_dict()`. In worker processes only torchdata's loader can ask it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from accel_state.errors import NotAvailableError
from accel_train.data.iterable import IterableDatasetShard
from accel_train.data.rng_replay import Randomness, generators_of

__all__ = ["StatefulShard", "loader_class", "says_where_it_is"]


def says_where_it_is(dataset: Any) -> bool:
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


class StatefulShard(IterableDatasetShard):
    """One rank's part of an iterable dataset that says where it is.

    The place is that of the dataset, which is asked between two global batches.
    """

    _begun_with: dict[str, Any] | None = None
    """The generators when the epoch began: its first samples may be read again, for padding."""
    _untouched: Any = None
    """The dataset before it continued somewhere; None in an epoch that is read from its beginning."""
    _continues = False

    def __iter__(self) -> Iterator[Any]:
        if not self._continues:
            draws = _draws_of(self.dataset)
            self._begun_with, self._untouched = draws.tree(draws.now()), None
        self._continues = False
        return super().__iter__()

    def first_samples(self, read: list[Any]) -> list[Any]:
        """The samples of the epoch's first global batch; read again if the epoch was continued after it."""
        if self._untouched is None:
            return read
        fresh = copy.deepcopy(self._untouched)
        if hasattr(fresh, "set_epoch"):
            fresh.set_epoch(self.epoch)
        with _draws_of(fresh).as_of(self._begun_with):
            return list(itertools.islice(iter(fresh), self.global_batch))

    def state_dict(self) -> dict[str, Any]:
        """The dataset's state, and the generators when the epoch began."""
        return {"dataset": self.dataset.state_dict(), "begun_with": self._begun_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was asked."""
        self._untouched = copy.deepcopy(self.dataset)
        self.dataset.load_state_dict(state["dataset"])
        self._begun_with = state["begun_with"]
        self._continues = True


def _draws_of(dataset: Any) -> Randomness:
    return Randomness(generators_of([], [dataset]), True)
