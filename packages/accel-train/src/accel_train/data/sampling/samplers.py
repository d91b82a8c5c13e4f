"""Finding the samplers of a loader, through all that wraps them; and its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_train.data.sampling.batches import ShardedBatchSampler, SkipBatchSampler

__all__ = [
    "epoch_followers",
    "epochs_of",
    "innermost_sampler",
    "loader_options",
    "samplers_of",
    "stateful_samplers",
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


def epoch_followers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers and the dataset of a loader that have ``set_epoch``."""
    return [follower for follower in (*samplers_of(loader), loader.dataset) if hasattr(follower, "set_epoch")]


def epochs_of(loader: DataLoader[Any], followers: Iterable[Any]) -> list[tuple[Any, int]]:
    """Which epoch they and the script's own dataset are in, of those that have an attribute ``epoch``."""
    inner = getattr(loader.dataset, "dataset", None)  # inside of a shard
    known = [(follower, getattr(follower, "epoch", None)) for follower in (*followers, inner)]
    return [(follower, epoch) for follower, epoch in known if type(epoch) is int and epoch >= 0]


def stateful_samplers(samplers: Iterable[Any]) -> list[Any]:
    """Select the samplers that have ``state_dict()`` and ``load_state_dict()``."""
    return [
        sampler
        for sampler in samplers
        if hasattr(sampler, "state_dict")
        and callable(sampler.state_dict)
        and callable(getattr(sampler, "load_state_dict", None))
    ]


def _holder(batch_sampler: Any, sampler: Any) -> Any:
    """The batch sampler whose `sampler` attribute yields single indices; None without batch samplers."""
    outer = sampler if isinstance(sampler, BatchSampler) else batch_sampler
    while isinstance(outer, ShardedBatchSampler | SkipBatchSampler):
        outer = outer.batch_sampler
    return outer


def innermost_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """The sampler that yields single indices, below all batch samplers; None if a batch sampler has none."""
    holder = _holder(batch_sampler, sampler)
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
