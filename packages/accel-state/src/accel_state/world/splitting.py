"""Splitting inputs between processes: pure index arithmetic, independent of process groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from accel_state.errors import ConfigError

__all__ = ["part_bounds", "split_for_rank"]


def part_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and one-past-last index of ``rank``'s part of ``length`` elements.

    Parts are contiguous and in rank order. Their lengths differ by at most one; the first ``length % world_size``
    parts are longer.
    """
    size, longer = divmod(length, world_size)
    start = rank * size + min(rank, longer)
    return start, start + size + (rank < longer)


def split_for_rank(
    inputs: Any,
    rank: int,
    world_size: int,
    *,
    apply_padding: bool = False,
    device: torch.device | None = None,
) -> Any:
    """``rank``'s part of ``inputs``, as a new object; ``inputs`` is never changed.

    Args:
        inputs: a list, a tuple, a tensor of shape (n, …), a ``datasets.Dataset``, or a dict or named tuple of
            these with equal lengths, nested to any depth. Any other object is returned unchanged.
        rank: the rank whose part is returned.
        world_size: number of parts.
        apply_padding: repeat the last element of ``inputs``, so that every part has ``ceil(n / world_size)`` elements.
        device: the device that tensors are moved to; None: they stay.

    Raises:
        ConfigError: values of a dict differ in length, or one of them cannot be split.
    """
    length = _common_length(inputs, "inputs")
    if length is None:
        return inputs
    start, stop = part_bounds(length, rank, world_size)
    padding = -(-length // world_size) - (stop - start) if apply_padding else 0
    return _take(inputs, start, stop, padding, device)


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "select") and hasattr(value, "column_names") and hasattr(value, "__len__")


def _children(value: Any) -> Mapping[Any, Any] | None:
    """The named values of a dict or named tuple, each of which is split; None for other objects."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return value if isinstance(value, Mapping) else None


def _common_length(value: Any, path: str) -> int | None:
    """Number of elements of ``value``; None if it cannot be split."""
    children = _children(value)
    if children is None:
        is_row_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        return len(value) if isinstance(value, list | tuple) or is_row_tensor or _is_dataset(value) else None
    lengths: dict[str, int] = {}
    for key, child in children.items():
        name = f"{path}[{key!r}]"
        length = _common_length(child, name)
        if length is None:
            raise ConfigError(
                f"{name} is of type {type(child).__name__}, which cannot be split between processes; "
                "pass it separately, or make it a list or tensor of the same length as the others"
            )
        lengths[name] = length
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"values split together between processes must have the same length, but {listed}")
    return next(iter(lengths.values()), None)


def _take(value: Any, start: int, stop: int, padding: int, device: torch.device | None) -> Any:
    """Elements ``start`` to ``stop`` of ``value``, then ``padding`` times its last one."""
    children = _children(value)
    if children is not None:
        parts = {key: _take(child, start, stop, padding, device) for key, child in children.items()}
        return _like(value, parts)
    if isinstance(value, torch.Tensor):
        part = value[start:stop]
        if padding:
            part = torch.cat([part, *[value[-1:]] * padding])
        return part if device is None else part.to(device)
    if isinstance(value, list):
        return value[start:stop] + value[-1:] * padding
    if isinstance(value, tuple):
        return value[start:stop] + value[-1:] * padding
    last = len(value) - 1
    return value.select([*range(start, stop), *[last] * padding] if padding else range(start, stop))


def _like(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*parts.values())
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    clone = copy.copy(value)  # keeps the type, such as OrderedDict or a tokenizer's output
    clone.update(parts)
    return clone
