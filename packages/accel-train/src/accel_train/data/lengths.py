"""Check, with one exchange between ranks, that all have data of the same length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_state.operations.collectives import gather_object
from accel_train.data.sampling.batches import length_of
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["check_lengths"]


def check_lengths(ranks: Ranks, loaders: Sequence[Any]) -> None:
    """Check that ranks share the same data, where each reads its part of a dataset; a collective.

    Args:
        ranks: those that read different samples.
        loaders: prepared loaders. Iterable datasets, dispatching loaders, and loaders of data that is sharded already
            are not checked.

    Raises:
        DataError: on all ranks, if the datasets or samplers of a loader differ in length, or its batches in size.
    """
    if ranks.size == 1 or not loaders:
        return
    mine = list(map(_counts, loaders))
    for place, found in enumerate(zip(*gather_object([mine]), strict=True)):
        other = next((rank for rank, counts in enumerate(found) if counts != found[0]), None)
        if other is None:
            continue
        what, here, there = next(
            (what, here, there)
            for what, here, there in zip(_COUNTED, found[0], found[other], strict=True)
            if here != there
        )
        raise DataError(
            f"{what} of loader {place + 1} of this prepare() call is {here} on rank 0 and {there} on rank {other}. "
            "prepare() gives each rank its part of one dataset, which must be the same on all: build it, its sampler "
            "and its loader alike everywhere. If each rank has its own data, pass "
            "Accelerator(dataloader_config=DataLoaderConfiguration(pre_sharded=True))."
        )


_COUNTED = ("The length of the dataset", "The length of the sampler", "The batch size")


def _counts(loader: Any) -> tuple[int | None, ...]:
    """Numbers by which data is shared out by index; None: there is nothing to compare."""
    find = getattr(loader, "share", None)
    share = None if find is None else find()
    if share is None:
        return (None,) * len(_COUNTED)
    sampler = loader.get_sampler()
    return length_of(loader.dataset), None if sampler is None else length_of(sampler), share.batch_size
