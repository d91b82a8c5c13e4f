"""One exchange of the lengths of data that ranks are to share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_state.communication.collectives import gather_object
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["check_lengths"]


def check_lengths(ranks: Ranks, loaders: Sequence[Any]) -> None:
    """Check that ranks share the same data, where each reads its part of a dataset; a collective.

    Args:
        ranks: those that read different samples.
        loaders: prepared ones. Streams, loaders that send batches, and those that hold one rank's data already are left
            alone.

    Raises:
        DataError: on all ranks, if the datasets of a loader differ in length.
    """
    if ranks.size == 1 or not loaders:
        return
    mine = [_length(loader) for loader in loaders]
    for place, lengths in enumerate(zip(*gather_object([mine]), strict=True)):
        if len(set(lengths)) > 1:
            raise DataError(
                f"The dataset of loader {place + 1} of this prepare() call has {lengths[0]} samples on rank 0 and "
                f"{next(n for n in lengths if n != lengths[0])} on rank "
                f"{next(rank for rank, n in enumerate(lengths) if n != lengths[0])}. prepare() gives each rank its "
                "part of one dataset, which must be the same on all: build it alike everywhere. If each rank has data "
                "of its own, say so: Accelerator(dataloader_config=DataLoaderConfiguration(pre_sharded=True))."
            )


def _length(loader: Any) -> int | None:
    """Samples of a dataset that is shared out by index; None: there is nothing to compare."""
    share = getattr(loader, "share", None)
    if share is None or share() is None:
        return None
    try:
        return len(loader.dataset)
    except TypeError:
        return None
