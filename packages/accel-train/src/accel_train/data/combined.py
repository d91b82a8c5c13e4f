"""Loaders over other loaders, each of which is prepared by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch.utils.data import DataLoader

from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.loader import DataLoaderStateMixin, PreparedLoader

__all__ = ["CombinedLoader", "single_loaders"]


class CombinedLoader(DataLoaderStateMixin, DataLoader[Any]):
    """A loader whose batches come from other loaders; it answers about its last batch as a prepared loader does."""

    @property
    @abstractmethod
    def sources(self) -> Mapping[str, PreparedLoader]:
        """The prepared loaders that batches come from, by name."""

    @property
    @abstractmethod
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the last returned batch; None when that is not known."""

    @property
    @abstractmethod
    def full_rows(self) -> int | None:
        """Rows of a full batch of this rank; None when batches vary."""

    @property
    @abstractmethod
    def real_rows(self) -> int | None:
        """How many leading rows of this rank's last batch are real; None when all are."""

    @property
    @abstractmethod
    def may_pad(self) -> bool:
        """Whether rows can be padding."""

    @abstractmethod
    def prepare_each(
        self, prepare: Callable[[DataLoader[Any]], PreparedLoader], ledger: ActiveLoaders
    ) -> Self:
        """The same over prepared loaders.

        Args:
            prepare: prepares a loader; returns one that is prepared as it is.
            ledger: where the combined loader reports.
        """


def single_loaders(loader: PreparedLoader | CombinedLoader) -> list[PreparedLoader]:
    """The loaders of one dataset each that a prepared loader reads."""
    return [*loader.sources.values()] if isinstance(loader, CombinedLoader) else [loader]
