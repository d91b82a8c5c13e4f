"""The loader of one rank that reads its own part of the data."""

from __future__ import annotations

from typing import Any

from accel_train.data.epoch_start import open_own_part
from accel_train.data.iterable import IterableDatasetShard, valid_rows_of_round
from accel_train.data.iterators import AheadIterator, LoaderIterator, TimedIterator
from accel_train.data.loader import PreparedLoader
from accel_train.data.sampling.batches import (
    ShardedBatchSampler,
    SkipBatchSampler,
    padded_rows,
    plan_of,
)
from accel_train.data.transfer import BatchTransfer, StreamTransfer, choose_transfer

__all__ = ["DataLoaderShard"]


class DataLoaderShard(PreparedLoader):
    """A data loader that reads this rank's part of the data: its dataset or batch sampler yields only that part.

    Its arguments are those of `PreparedLoader`.
    """

    reads_own_part = True
    open_source = open_own_part
    pre_sharded: bool = False
    """Whether the dataset brought its own sharding, so that ranks may hold different numbers of batches."""

    @property
    def _shard(self) -> IterableDatasetShard | None:
        return self.dataset if isinstance(self.dataset, IterableDatasetShard) else None

    def _make_transfer(self) -> BatchTransfer | None:
        return choose_transfer(
            self.device, non_blocking=self._non_blocking, background_workers=self.num_workers > 0
        )

    def __iter__(self) -> Any:
        # Fetching ahead asks the sampler for indices earlier; only one that is drawn at once does not mind.
        ahead = isinstance(self.transfer, StreamTransfer)
        if ahead and (self.indexes is None or plan_of(self.indexes.sampler).source is not None):
            iterator: LoaderIterator = AheadIterator(self)
        else:
            iterator = LoaderIterator(self)
        pulse = self.ledger.pulse
        return iterator if pulse is None else TimedIterator(iterator, pulse)

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the last returned batch; None when that is not known."""
        current, shard = self.current, self._shard
        if shard is None:
            return super().batch_rows
        return shard.local_batch if current is not None and current.yielded and self._auto_collation else None

    @property
    def total_rows(self) -> int | None:
        """Real rows of the last returned batch over all ranks; None when neither sampler nor batch tells."""
        current = self.current
        return super().total_rows if current is None or current.real is None else current.real

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the last returned batch are real; None when all are.

        A number above the number of rows means all of them.
        """
        current, shard = self.current, self._shard
        if shard is None or current is None or current.real is None:
            return super().valid_rows()
        return valid_rows_of_round(shard, current.real, batches=not self._auto_collation)

    def _index_of_part(self) -> int:
        share = self.share()
        return super()._index_of_part() if share is None else share.process_index

    @property
    def may_pad(self) -> bool:  # type: ignore[override]
        """Whether rows can be padding."""
        shard = self._shard
        if shard is not None:
            return not shard.drop_last
        share = self.share()
        if share is None:
            return padded_rows(self._batch_sampler()) is not None
        return share.even_batches and not share.drop_last

    @property
    def may_be_uneven(self) -> bool:  # type: ignore[override]
        """Whether ranks can hold different numbers of batches."""
        share = self.share()
        if share is None or share.num_processes != self.ranks.size:  # a sampler that takes its own part
            return self.pre_sharded or share is not None
        return not share.even_batches and not share.drop_last

    @property
    def stream_stride(self) -> int | None:
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        shard = self._shard
        if shard is not None:
            return shard.global_batch
        return None if self.pre_sharded else super().stream_stride

    @property
    def splits_batches(self) -> bool:
        """Whether a batch of the sampler, or stream, is cut into one part per rank."""
        part = self._shard or self.share()
        return part is not None and part.split_batches

    @property
    def sampler_batches_per_step(self) -> int:
        """Batches of the sampler that one step of all ranks takes."""
        share = self.share()
        return 1 if share is None or share.split_batches else share.num_processes

    def share(self) -> ShardedBatchSampler | None:
        """The sampler of this rank's batches of a map-style dataset; None if nothing is sharded here."""
        sampler = self._batch_sampler()
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        return sampler if isinstance(sampler, ShardedBatchSampler) else None

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        shard = self._shard
        if shard is not None:
            return shard.global_batch
        share = self.share()
        if share is not None:
            return None if share.batch_size is None else share.layout(0).stride
        return super().total_batch_size

    @property
    def full_rows(self) -> int | None:
        """Rows of a full batch of this rank; None when batches vary."""
        share = self.share()
        if share is None:
            return super().full_rows
        return None if share.batch_size is None else share.layout(0).batch

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset over all ranks."""
        shard = self._shard
        if shard is not None:
            return len(shard.dataset)
        return super().total_dataset_length
