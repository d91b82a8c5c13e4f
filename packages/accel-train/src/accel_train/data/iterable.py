"""Sharing out an iterable dataset: every rank reads all of it and keeps its part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from accel_train.data.sampling.batches import check_split
from accel_train.data.sampling.index_streams import ALL_ROWS
from accel_train.data.sampling.layout import clip_rows

__all__ = ["IterableDatasetShard", "Tagged", "TaggingCollate", "native_shard", "parts_of"]


class IterableDatasetShard(IterableDataset[Any]):
    """Shards an iterable dataset: every rank reads all of it, and yields its own part.

    The dataset is read in global batches; a rank keeps one contiguous slice of each. An incomplete last
    global batch is completed with the samples of the first one.

    Args:
        dataset: the dataset to shard; all ranks must read the same samples in the same order.
        batch_size: samples in one rank's batch, or in the global batch when `split_batches`.
        drop_last: drop an incomplete last global batch.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: whether `batch_size` is the global one.

    Raises:
        DataError: `split_batches` with a batch size that is not a multiple of `num_processes`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.round_rows = 0
        """Number of real samples (not padding) in the global batch of the last yielded sample."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and call the dataset's ``set_epoch`` if it has one."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def global_batch(self) -> int:
        """Samples in a full global batch."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    @property
    def local_batch(self) -> int:
        """Samples of it that this rank keeps."""
        return self.global_batch // self.num_processes

    def __len__(self) -> int:
        full, left = divmod(len(self.dataset), self.global_batch)
        return (full if self.drop_last or not left else full + 1) * self.local_batch

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size = self.global_batch
        mine = slice(self.process_index * self.local_batch, (self.process_index + 1) * self.local_batch)
        source = iter(self.dataset)
        first: list[Any] | None = None
        while batch := list(itertools.islice(source, size)):
            if first is None:
                first = batch
            real = len(batch)
            if real < size:
                if self.drop_last:
                    return
                batch = [*batch, *itertools.islice(itertools.cycle(self.first_samples(first)), size - real)]
            self.round_rows = real
            yield from batch[mine]

    def first_samples(self, read: list[Any]) -> list[Any]:
        """The samples that complete the last global batch, from the first global batch, of which some were `read`."""
        return read


class Tagged(NamedTuple):
    """A collated batch with the number of real samples in the global batch that it is a part of.

    A named tuple, because torch's pinning thread looks inside those.
    """

    real: int
    batch: Any


class TaggingCollate:
    """A collate function that adds how many samples of the global batch are real.

    It runs where the shard is read, possibly in a worker process, since only there it is known.
    """

    def __init__(self, shard: IterableDatasetShard, collate: Callable[[Any], Any]) -> None:
        self._shard = shard
        self._collate = collate

    def __call__(self, samples: Any) -> Tagged:
        """Collate, and add the number."""
        return Tagged(self._shard.round_rows, self._collate(samples))


def valid_rows_of_round(shard: IterableDatasetShard, real: int, batches: bool) -> tuple[int, ...] | None:
    """Per rank, how many leading rows are real when the global batch has `real` samples; None when all are.

    Args:
        shard: the shard.
        real: the number that a `Tagged` batch carries.
        batches: whether each sample of the dataset is a whole batch.
    """
    if real == shard.global_batch:
        return None
    counts = clip_rows(real, shard.local_batch, shard.num_processes)
    return tuple(ALL_ROWS if count else 0 for count in counts) if batches else counts


# Datasets that bring their own sharding


def native_shard(dataset: Any, num_processes: int, process_index: int) -> Any | None:
    """Shard a dataset of Hugging Face's datasets library by its files; None if it has too few files."""
    if not type(dataset).__module__.startswith("datasets.") or not hasattr(dataset, "shard"):
        return None
    shards: int = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None) or 0
    if shards < num_processes:
        return None
    return dataset.shard(num_shards=num_processes, index=process_index)


def parts_of(dataset: Any) -> int | None:
    """The number of parts, of which a dataset declares that it yields one; None if it declares nothing.

    Datasets of `split_dataset_by_node`, and classes of other libraries like `IterableDatasetShard`, declare it.
    """
    if type(dataset).__name__ == "IterableDatasetShard":
        return getattr(dataset, "num_processes", None)
    return getattr(getattr(dataset, "_distributed", None), "world_size", None)
