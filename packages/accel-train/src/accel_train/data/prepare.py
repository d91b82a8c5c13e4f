"""Turns a plain data loader into one that reads this rank's samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from accel_state.messages import warn
from accel_state.world.process import PartialState
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.combined import CombinedLoader
from accel_train.data.dispatch.dispatcher import DataLoaderDispatcher
from accel_train.data.iterable import IterableDatasetShard, native_shard, parts_of
from accel_train.data.loader import PreparedLoader
from accel_train.data.sampling.batches import ShardedBatchSampler, check_split
from accel_train.data.sampling.samplers import innermost_sampler, loader_options, samplers_of
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.token_batches import TokenBatchSampler
from accel_train.data.shard import DataLoaderShard
from accel_train.data.skip import SkipDataLoader
from accel_train.data.stateful import StatefulShard, is_stateful
from accel_train.errors import ArgumentTypeError, DataError
from accel_train.mesh import batch_ranks
from accel_train.plugins import DataLoaderConfiguration
from accel_train.ranks import Ranks

__all__ = ["get_sampler", "prepare_data_loader", "prepare_for_ranks"]


class _Sharded(Enum):
    """What a loader already yields."""

    NO = "all of the data"
    PRE_SHARDED_EVEN = "one rank's part, with the same number of batches on every rank"
    PRE_SHARDED_UNEVEN = "one rank's part"


@dataclass(frozen=True, slots=True)
class _Request:
    """What all branches need."""

    loader: DataLoader[Any]
    ranks: Ranks
    split: bool
    even: bool
    sharded: _Sharded
    rng_types: list[Any] | None
    options: dict[str, Any]
    """Arguments of the prepared loader that do not depend on the branch."""


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | int | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    ledger: ActiveLoaders | None = None,
    pre_sharded: bool | None = None,
) -> PreparedLoader:
    """Shard a data loader: make it yield one rank's part of the data, on its device.

    Args:
        dataloader: a loader; one that is prepared already is returned unchanged.
        device: the device for batches, with `put_on_device`.
        num_processes: number of ranks; by default that of `PartialState`.
        process_index: this rank; by default that of `PartialState`.
        split_batches: the loader's batch size is the global one, divided among ranks; else it is each
            rank's own.
        put_on_device: whether batches are moved to `device`.
        rng_types: random number generators made equal on all ranks when an epoch begins.
        dispatch_batches: rank 0 reads and sends each rank its part; None: for iterable datasets that are
            put on a device, unless they are sharded already.
        even_batches: complete the last round with the first samples, so that all ranks get the same number of
            batches.
        slice_fn_for_dispatch: function with which rank 0 cuts a global batch:
            ``f(batch, slice, process_index=…, num_processes=…)``.
        use_seedable_sampler: replace a `RandomSampler` by one whose order depends on a seed and the epoch
            alone.
        data_seed: that seed; by default `torch.initial_seed()`.
        non_blocking: copy batches asynchronously; requires pinned memory.
        use_stateful_dataloader: a loaded state continues inside the epoch.
        torch_device_mesh: a named mesh over all ranks. Ranks that differ only in pipeline, context, sequence or tensor
            parallelism read the same samples.
        ledger: the ledger of the `Accelerator`.
        pre_sharded: the dataset or sampler yields only this rank's part already; None: detect it.

    Returns:
        A `DataLoaderShard` or a `DataLoaderDispatcher`.

    Raises:
        ArgumentTypeError: `dataloader` is not a `torch.utils.data.DataLoader`.
        OptionError: `torch_device_mesh` has no dimension names, or does not hold every rank exactly once.
        DataError: options exclude each other, or a batch size cannot be split.
    """
    if num_processes is None or process_index is None:
        state = PartialState()
        num_processes = state.num_processes if num_processes is None else num_processes
        process_index = state.process_index if process_index is None else process_index
    if not 0 <= process_index < num_processes:
        raise DataError(f"process_index must be in 0..{num_processes - 1}, got {process_index}.")
    if put_on_device and device is None:
        raise DataError("put_on_device=True needs a device. Pass `device`, or put_on_device=False.")
    prepared = prepare_for_ranks(
        dataloader,
        batch_ranks(torch_device_mesh, num_processes, process_index),
        DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
            pre_sharded=pre_sharded,
        ),
        device=device if put_on_device else None,
        rng_types=rng_types,
        slice_fn=slice_fn_for_dispatch,
        ledger=ledger,
    )
    if torch_device_mesh is not None and prepared is not dataloader:
        prepared.torch_device_mesh = torch_device_mesh
    return prepared


def prepare_for_ranks(
    dataloader: DataLoader[Any],
    ranks: Ranks,
    config: DataLoaderConfiguration,
    *,
    device: torch.device | str | int | None = None,
    rng_types: list[Any] | None = None,
    slice_fn: Callable[..., Any] | None = None,
    ledger: ActiveLoaders | None = None,
) -> PreparedLoader:
    """Make a loader yield the part of the data of one batch index, on its device; see `prepare_data_loader`.

    Args:
        dataloader: a loader; one that is prepared already is returned unchanged.
        ranks: the ranks that read different samples. Ranks with the same index read exactly the same.
        config: the options.
        device: where batches are moved; None leaves them where they are.
        rng_types: random number generators made equal on all ranks when an epoch begins.
        slice_fn: how rank 0 cuts a global batch, if it dispatches.
        ledger: the ledger of the `Accelerator`.

    Raises:
        ArgumentTypeError: `dataloader` is no `torch.utils.data.DataLoader`.
        DataError: options that exclude each other, or a batch size that cannot be split.
    """
    if isinstance(dataloader, PreparedLoader) and not isinstance(dataloader, SkipDataLoader):
        if ledger is not None:
            dataloader.ledger = ledger
        return dataloader
    if isinstance(dataloader, CombinedLoader):
        raise ArgumentTypeError(
            f"prepare_data_loader() prepares a loader of one dataset, got {type(dataloader).__name__}. Use "
            "accelerator.prepare(), or prepare its sources and build it from those."
        )
    if not isinstance(dataloader, DataLoader):
        raise ArgumentTypeError(
            f"prepare_data_loader() takes a torch.utils.data.DataLoader, got {type(dataloader).__name__}. "
            "Wrap the dataset in a DataLoader first."
        )
    _check_kind(dataloader, ranks)
    iterable = isinstance(dataloader.dataset, IterableDataset)
    sharded = _sharded_already(dataloader, ranks, config.pre_sharded)
    dispatch = _decide_dispatch(config.dispatch_batches, device, iterable, sharded is not _Sharded.NO)
    if config.split_batches:
        check_split(_batch_size(dataloader), ranks.size)
    batch_sampler, sampler = dataloader.batch_sampler, dataloader.sampler
    if config.use_seedable_sampler and not iterable:
        batch_sampler, sampler = _with_seedable_sampler(dataloader, config.data_seed)
    if isinstance(batch_sampler, TokenBatchSampler):
        batch_sampler = batch_sampler.for_ranks(ranks.size)  # the user's own loader keeps its sampler
    request = _Request(
        loader=dataloader,
        ranks=ranks,
        split=config.split_batches,
        even=config.even_batches,
        sharded=sharded,
        rng_types=rng_types,
        options={
            "device": device,
            "skip_batches": dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0,
            "use_stateful_dataloader": config.use_stateful_dataloader,
            "_non_blocking": config.non_blocking,
            "_drop_last": dataloader.drop_last,
            "ledger": ledger,
            "ranks": ranks,
            **loader_options(dataloader),
            "in_order": _keeps_order(dataloader, ranks, config.use_stateful_dataloader),
        },
    )
    if dispatch:
        return _dispatcher(request, slice_fn, batch_sampler, sampler)
    if iterable:
        return _iterable_shard(request)
    return _map_style_shard(request, batch_sampler, sampler)


# Decisions


def _keeps_order(loader: DataLoader[Any], ranks: Ranks, stateful: bool) -> bool:
    """Whether workers return batches in order: by the loader's option, unless a batch's place has a meaning."""
    if loader.in_order or not loader.num_workers or (ranks.world_size == 1 and not stateful):
        return loader.in_order
    warn(
        "in_order=False was changed to True: all processes must read batches of the same round in a step, and a "
        "saved position inside the epoch must mean the same when it is loaded.",
    )
    return True


def _sharded_already(loader: DataLoader[Any], ranks: Ranks, declared: bool | None) -> _Sharded:
    """Whether the loader yields one rank's part only, by declaration or by what it contains."""
    if declared is False or ranks.size == 1:
        return _Sharded.NO
    for owner, parts, kind in _parts(loader):
        if parts == ranks.size:
            return kind
        if parts != 1 and declared is None:
            warn(
                f"{type(owner).__name__} yields one of {parts} parts, and that part is divided again among "
                f"{ranks.size} ranks: samples are lost unless all ranks hold the same part. Make {ranks.size} parts, "
                "or only one; pre_sharded=False declares that this is intended.",
            )
    return _Sharded.PRE_SHARDED_UNEVEN if declared else _Sharded.NO


def _parts(loader: DataLoader[Any]) -> Iterator[tuple[object, int, _Sharded]]:
    """Datasets and samplers of a loader that yield one part of several, each with the number of parts."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        yield dataset, dataset.num_processes, _Sharded.PRE_SHARDED_EVEN
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            yield sampler, sampler.num_replicas, _Sharded.PRE_SHARDED_EVEN
        elif isinstance(sampler, ShardedBatchSampler):
            yield sampler, sampler.num_processes, _Sharded.PRE_SHARDED_EVEN
    parts = parts_of(dataset)
    if parts is not None:
        yield dataset, parts, _Sharded.PRE_SHARDED_UNEVEN


def _check_kind(loader: DataLoader[Any], ranks: Ranks) -> None:
    """Say what of a loader of another class cannot be kept."""
    kind = type(loader)
    if isinstance(loader, SkipDataLoader):
        if loader.skip_batches and ranks.size > 1:
            raise DataError(
                f"This loader skips {loader.skip_batches} batches of data that {ranks.size} ranks share. "
                "Prepare the whole loader first, and then skip: skip_first_batches(prepared, num_batches)."
            )
        return
    lost = [name for name in ("__iter__", "__len__") if getattr(kind, name) is not getattr(DataLoader, name)]
    if lost:
        warn(
            f"{kind.__name__} overrides {' and '.join(lost)} of DataLoader, which has no effect after prepare(): a "
            "prepared loader reads the dataset itself. Move the change to the dataset or to collate_fn, or wrap the "
            "prepared loader.",
        )


def _decide_dispatch(asked: bool | None, device: object, iterable: bool, sharded_already: bool) -> bool:
    if asked is None:
        return device is not None and iterable and not sharded_already
    if asked and device is None:
        raise DataError(
            "dispatch_batches=True sends batches between devices and needs put_on_device=True (of an Accelerator: "
            "device_placement=True). Pass it, or use dispatch_batches=False."
        )
    if asked and sharded_already:
        raise DataError(
            "dispatch_batches=True lets rank 0 read for all ranks, but the data is sharded already: the "
            "parts of the other ranks would never be read. Use dispatch_batches=False, or data that is "
            "not sharded."
        )
    return bool(asked)


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(sampler, "batch_size", None)


def _with_seedable_sampler(loader: DataLoader[Any], data_seed: int | None) -> tuple[Any, Any]:
    """The loader's batch sampler and sampler with torch's random sampler replaced by the seedable one."""
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    holder = sampler if isinstance(sampler, BatchSampler) else batch_sampler
    random = sampler if holder is None else getattr(holder, "sampler", None)
    if not isinstance(random, RandomSampler) or isinstance(random, SeedableRandomSampler):
        return batch_sampler, sampler
    seedable = SeedableRandomSampler(
        random.data_source,
        random.replacement,
        random._num_samples,
        random.generator,
        data_seed=data_seed,
    )
    if holder is None:
        return None, seedable
    replaced: Any = copy.copy(holder)  # the user's own loader keeps its sampler
    replaced.sampler = seedable
    return (None, replaced) if holder is sampler else (replaced, seedable)


# Branches


def _dispatcher(
    request: _Request, slice_fn: Callable[..., Any] | None, batch_sampler: Any, sampler: Any
) -> PreparedLoader:
    loader = request.loader
    own: dict[str, Any] = {"split_batches": request.split, "slice_fn": slice_fn}
    if isinstance(loader.dataset, IterableDataset):
        own |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return _build(DataLoaderDispatcher, request, loader.dataset, **own)
    prepared = _build(DataLoaderDispatcher, request, loader.dataset, **own, **_place(batch_sampler, sampler))
    return _show(prepared, sampler, loader.batch_size, loader.drop_last)


def _iterable_shard(request: _Request) -> PreparedLoader:
    loader, ranks = request.loader, request.ranks
    dataset, batch_size, generator = loader.dataset, loader.batch_size, None
    anyhow = request.sharded is _Sharded.PRE_SHARDED_UNEVEN
    if (
        request.sharded is _Sharded.PRE_SHARDED_EVEN
        and isinstance(dataset, IterableDatasetShard)
        and dataset.local_batch != (batch_size or 1)
    ):
        raise DataError(
            f"The dataset is an IterableDatasetShard that gives a rank {dataset.local_batch} samples at a time, "
            f"but the loader's batch_size is {batch_size}. Use batch_size={dataset.local_batch}."
        )
    if ranks.size > 1 and request.sharded is _Sharded.NO:
        own = None if request.split else native_shard(dataset, ranks.size, ranks.index)
        if own is not None:
            dataset, anyhow = own, True
        else:
            generator = getattr(dataset, "generator", None)
            stateful = request.options["use_stateful_dataloader"] and is_stateful(dataset)
            dataset = (StatefulShard if stateful else IterableDatasetShard)(
                dataset,
                batch_size=1 if batch_size is None else batch_size,
                drop_last=loader.drop_last,
                num_processes=ranks.size,
                process_index=ranks.index,
                split_batches=request.split,
            )
            batch_size = None if batch_size is None else dataset.local_batch
    prepared = _build(
        DataLoaderShard, request, dataset, generator, batch_size=batch_size, drop_last=loader.drop_last
    )
    prepared.pre_sharded = anyhow
    return prepared


def _map_style_shard(request: _Request, batch_sampler: Any, sampler: Any) -> PreparedLoader:
    loader, ranks, batch_size = request.loader, request.ranks, request.loader.batch_size
    innermost = innermost_sampler(batch_sampler, sampler)
    seeded = isinstance(innermost, SeedableRandomSampler)
    generator = None if seeded else getattr(innermost, "generator", None)
    if ranks.size > 1 and request.sharded is _Sharded.NO:
        base = sampler if batch_sampler is None else batch_sampler
        share = ShardedBatchSampler(base, ranks.size, ranks.index, request.split, request.even)
        if batch_sampler is None:
            sampler = share
        else:
            batch_sampler = share
            batch_size = None if batch_size is None else share.layout(0).batch
    prepared = _build(DataLoaderShard, request, loader.dataset, generator, **_place(batch_sampler, sampler))
    prepared.pre_sharded = request.sharded is _Sharded.PRE_SHARDED_UNEVEN
    return _show(prepared, sampler, batch_size, loader.drop_last)


_Loader = TypeVar("_Loader", bound=PreparedLoader)


def _build(
    kind: type[_Loader], request: _Request, dataset: Any, generator: Any = None, **options: Any
) -> _Loader:
    """Make the loader; `generator` is what draws the order, if it is a generator of torch."""
    found = generator if isinstance(generator, torch.Generator) else None
    rng_types = request.rng_types
    if rng_types and found is None:  # the name "generator" means nothing then
        rng_types = [name for name in rng_types if name != "generator"]
    return kind(dataset, synchronized_generator=found, rng_types=rng_types, **request.options, **options)


def _place(batch_sampler: Any, sampler: Any) -> dict[str, Any]:
    """The arguments that determine which samples a loader of a map-style dataset yields."""
    if batch_sampler is None:
        return {"sampler": sampler, "batch_size": None}
    return {"batch_sampler": batch_sampler}


def _show(prepared: _Loader, sampler: Any, batch_size: int | None, drop_last: bool) -> _Loader:
    """Let a loader that was built on a batch sampler show what a loader built from a batch size shows."""
    # Torch clears these attributes when it is given a batch sampler, and forbids to set them later.
    prepared.__dict__.update(sampler=sampler, batch_size=batch_size, drop_last=drop_last)
    return prepared


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of a plain or prepared loader that yields single indices."""
    return innermost_sampler(dataloader.batch_sampler, dataloader.sampler)
