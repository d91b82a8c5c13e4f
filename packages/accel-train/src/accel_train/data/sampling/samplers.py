"""Finding the samplers of a loader, through all that wraps them; and its options."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_train.data.sampling.batches import ShardedBatchSampler, SkipBatchSampler

__all__ = [
    "innermost_sampler",
    "loader_options",
    "samplers_of",
]

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Every batch sampler and sampler of a loader, from the outside in, each once."""
    found: dict[int, Any] = {}
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or id(sampler) in found:
            continue
        found[id(sampler)] = sampler
        waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return [*found.values()]


def innermost_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """The sampler that yields single indices, below all batch samplers; None if a batch sampler has none."""
    holder = sampler if isinstance(sampler, BatchSampler) else batch_sampler
    while isinstance(holder, ShardedBatchSampler | SkipBatchSampler):
        holder = holder.batch_sampler
    if holder is None:
        return sampler
    if batch_sampler is None and not isinstance(holder, BatchSampler):
        return holder  # single indices shared out among ranks
    return getattr(holder, "sampler", None)


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a loader that have nothing to do with which samples it yields."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    return options
