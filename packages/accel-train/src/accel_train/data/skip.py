"""Skipping the first batches of a loader, to continue an interrupted epoch."""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_train.data.combined import CombinedLoader
from accel_train.data.loader import PreparedLoader
from accel_train.data.position_checks import check_lengths, check_workers, steps_to
from accel_train.data.sampling.batches import SkipBatchSampler
from accel_train.data.sampling.samplers import loader_options
from accel_train.data.shard import DataLoaderShard
from accel_train.errors import ArgumentTypeError, DataError

__all__ = ["SkipDataLoader", "skip_first_batches"]


class SkipDataLoader(DataLoaderShard):
    """A loader of one process that skips its first batches; it has the attributes of a prepared loader.

    `Accelerator.prepare` takes it like a plain loader.

    Args:
        dataset: the dataset.
        skip_batches: how many batches every iteration skips; those of an iterable dataset are read and dropped.
        use_stateful_dataloader: whether a loaded state continues inside the epoch.
        **kwargs: as for `DataLoaderShard`.
    """

    skips_steps = True

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like `dataloader` that skips the first `num_batches` batches of every iteration.

    With a map-style dataset the skipped batches are not read. The new loader has all options of a prepared loader, and
    shares its epoch: when the new loader has finished the epoch, the old one continues with the next.

    Args:
        dataloader: a prepared or a plain loader.
        num_batches: batches of this rank to skip.

    Raises:
        ArgumentTypeError: `num_batches` is not a whole number.
        DataError: `num_batches` is negative, or the loader will continue at a restored position by itself, or
            `num_batches` counts batches of another number of ranks.
    """
    try:
        num_batches = operator.index(num_batches)
    except TypeError:
        raise ArgumentTypeError(
            f"num_batches must be a whole number, got {num_batches!r} ({type(num_batches).__name__}). Round it first."
        ) from None
    if num_batches < 0:
        raise DataError(f"num_batches must be 0 or more, got {num_batches}.")
    if isinstance(dataloader, CombinedLoader):
        raise ArgumentTypeError(
            f"skip_first_batches() skips batches of one loader, got {type(dataloader).__name__}, which continues at a "
            "loaded position by itself. Load its state, and iterate it."
        )
    if isinstance(dataloader, PreparedLoader):
        _check_with_restored(dataloader, num_batches)
        return _skip_prepared(dataloader, num_batches)
    options = loader_options(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(
            dataloader.dataset,
            num_batches,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            **options,
        )
    if dataloader.batch_sampler is None:
        sampler = SkipBatchSampler(dataloader.sampler, num_batches)
        return DataLoader(dataloader.dataset, batch_size=None, sampler=sampler, **options)
    batch_sampler = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return DataLoader(dataloader.dataset, batch_sampler=batch_sampler, **options)


def _check_with_restored(loader: PreparedLoader, num_batches: int) -> None:
    """Compare what shall be skipped with a state that was loaded and waits for its epoch."""
    restored = loader.epoch_state.restored
    if restored is None or not restored.batches_yielded or not num_batches:
        return
    if loader.use_stateful_dataloader:
        raise DataError(
            f"The loader continues after its saved {restored.batches_yielded} batches by itself, because it "
            f"was prepared with use_stateful_dataloader=True; skip_first_batches({num_batches}) would "
            "skip twice. Iterate the loader itself."
        )
    if num_batches != restored.batches_yielded:
        return
    check_lengths(loader, restored)
    check_workers(loader, restored)
    steps = steps_to(loader, restored.position)
    if restored.ranks != loader.ranks.size and steps not in (None, num_batches):
        raise DataError(
            f"The state was saved after {num_batches} batches on each of {restored.ranks} ranks; for "
            f"{loader.ranks.size} ranks that is after {steps:g}. Skip that number, or let the loader do it: "
            "DataLoaderConfiguration(use_stateful_dataloader=True)."
        )
    # A script does not skip a whole epoch that was not begun, so it means the saved one, which yields nothing more.
    loader.epoch_state.iteration = restored.epoch


def _skip_prepared(loader: PreparedLoader, num_batches: int) -> PreparedLoader:
    skipping = copy.copy(loader)
    skipping.left_out += num_batches
    if loader.indexes is None or loader.skips_steps:
        skipping.skip_batches = loader.skip_batches + num_batches
        return skipping
    # Torch forbids the assignment after construction because a running iterator would not see it; a copy
    # has none.
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = SkipBatchSampler(getattr(loader, place), num_batches)
    skipping.__dict__[place] = sampler
    skipping.indexes = loader.indexes.over(sampler)
    return skipping
