"""The loader of one rank that reads its own part of the data."""

from __future__ import annotations

from typing import Any

import torch

from accel_train.data.batches import (
    ShardedBatchSampler,
    SkipBatchSampler,
    arithmetic_source,
    padded_rows,
)
from accel_train.data.iterable import IterableDatasetShard, TaggingCollate, valid_rows_of_round
from accel_train.data.iterators import AheadIterator, LoaderIterator
from accel_train.data.ledger import LoaderLedger
from accel_train.data.loader import PreparedLoader
from accel_train.data.transfer import Transfer, choose_transfer

__all__ = ["DataLoaderShard"]


class DataLoaderShard(PreparedLoader):
    """A data loader for one rank: its dataset or batch sampler already yields that rank's part only.

    Args:
        dataset: the dataset, or its shard.
        device: where batches are moved; None leaves them.
        rng_types: generators made equal on all ranks at each epoch: "torch", "cuda", "generator", …
        synchronized_generator: the generator meant by "generator".
        skip_batches: batches left out at the start of every iteration.
        use_stateful_dataloader: whether a loaded state continues inside the epoch.
        _drop_last: whether the original loader dropped an incomplete last batch.
        _non_blocking: whether the move overlaps with the host.
        torch_device_mesh: kept for reference.
        iteration: epochs iterated before.
        pre_sharded: the dataset brought its own sharding, so ranks may hold different numbers of batches.
        **kwargs: as for `torch.utils.data.DataLoader`.

    The other parameters are those of `PreparedLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        pre_sharded: bool = False,
        ledger: LoaderLedger | None = None,
        num_processes: int = 1,
        process_index: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            non_blocking=_non_blocking,
            iteration=iteration,
            ledger=ledger,
            num_processes=num_processes,
            process_index=process_index,
            **kwargs,
        )
        self._drop_last = _drop_last
        self.torch_device_mesh = torch_device_mesh
        self.pre_sharded = pre_sharded
        self._shard = dataset if isinstance(dataset, IterableDatasetShard) else None
        self.tagged = self._shard is not None

    def _make_transfer(self) -> Transfer | None:
        return choose_transfer(
            self.device, non_blocking=self._non_blocking, background_workers=self.num_workers > 0
        )

    def __iter__(self) -> Any:
        # Fetching ahead asks the sampler for indices earlier; only one that is drawn at once does not mind.
        ahead = self.transfer is not None and self.transfer.ahead
        if ahead and (self.indexes is None or arithmetic_source(self._batch_sampler()) is not None):
            return AheadIterator(self)
        return LoaderIterator(self)

    def _torch_iterator(self) -> Any:
        if self._shard is None:
            return super()._torch_iterator()
        # Torch's iterator takes the function over when it is created; users keep seeing their own.
        collate, self.collate_fn = self.collate_fn, TaggingCollate(self._shard, self.collate_fn)
        try:
            return super()._torch_iterator()
        finally:
            self.collate_fn = collate

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the batch handed out last; None when that is not known."""
        run, shard = self._run, self._shard
        if shard is None:
            return super().batch_rows
        return shard.local_batch if run is not None and run.yielded and self._auto_collation else None

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the batch handed out last are real; None when all are.

        A number above the number of rows means all of them.
        """
        run, shard = self._run, self._shard
        if shard is None or run is None or run.real is None:
            return super().valid_rows()
        return valid_rows_of_round(shard, run.real, batches=not self._auto_collation)

    @property
    def may_pad(self) -> bool:  # type: ignore[override]
        """Whether rows can be padding."""
        if self._shard is not None:
            return not self._shard.drop_last
        share = self._share()
        if share is None:
            return padded_rows(self._batch_sampler()) is not None
        return share.even_batches and not share.drop_last

    @property
    def may_be_uneven(self) -> bool:  # type: ignore[override]
        """Whether ranks can hold different numbers of batches."""
        share = self._share()
        if share is None:
            return self.pre_sharded
        return not share.even_batches and not share.drop_last

    def _stream_stride(self) -> int | None:
        if self._shard is not None:
            return self._shard.global_batch
        return None if self.pre_sharded else super()._stream_stride()

    def _base_batches_per_step(self) -> int:
        share = self._share()
        return 1 if share is None or share.split_batches else self.num_processes

    def _share(self) -> ShardedBatchSampler | None:
        sampler = self._batch_sampler()
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        return sampler if isinstance(sampler, ShardedBatchSampler) else None

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        if self._shard is not None:
            return self._shard.global_batch
        share = self._share()
        if share is not None:
            return None if share.batch_size is None else share.layout(0).stride
        return super().total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset over all ranks."""
        if self._shard is not None:
            return len(self._shard.dataset)
        return super().total_dataset_length
