"""Logged values of a training loop as plain Python numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accel_train.errors import ArgumentTypeError, OptionError

__all__ = ["flat", "plain", "plain_step", "split_numbers", "storable"]

#: Types that are logged as they are; told apart first, because nearly every value is one of them.
_PLAIN = frozenset({float, int, str, bool, type(None)})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values, with tensors and NumPy values of one element as Python numbers.

    All tensors of one device and dtype are copied to the host together, which waits for the device once, not once per
    value. Other values, including tensors of several elements, stay the same objects.

    Args:
        values: names to values; mappings inside are copied in the same way.

    Raises:
        OptionError: a value is a DTensor of which ranks hold different parts; reducing it here would wait for them.
    """
    copied: dict[str, Any] = {}
    waiting: _Places = {}
    _copy(values, copied, waiting)
    for places in waiting.values():
        numbers = torch.stack([tensor for _, _, tensor in places]).tolist()
        for (target, name, _), number in zip(places, numbers, strict=True):
            target[name] = number
    return copied


#: By device and dtype: where numbers are missing, and the tensors that hold them.
_Places = dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, Tensor]]]


def _copy(values: Mapping[str, Any], copied: dict[str, Any], waiting: _Places) -> None:
    for name, value in values.items():
        if type(value) in _PLAIN:
            copied[name] = value
        elif isinstance(value, Tensor):
            local = value if type(value) is Tensor else _local(name, value)
            if local.numel() != 1:
                copied[name] = value
            elif _is_on_host(local):
                copied[name] = local.item()
            else:
                copied[name] = None  # its place among the others
                place = (copied, name, local.detach().reshape(()))
                waiting.setdefault((local.device, local.dtype), []).append(place)
        elif isinstance(value, Mapping):
            inner: dict[str, Any] = {}
            copied[name] = inner
            _copy(value, inner, waiting)
        else:
            copied[name] = _number(value)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


def _local(name: str, value: Tensor) -> Tensor:
    """The tensor that this rank holds, of a tensor subclass."""
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(placement.is_replicate() for placement in placements):
        raise OptionError(
            f"log() got {name!r}, a DTensor with the placements {placements}: each rank holds a part of the value. "
            f"Log {name!r}.full_tensor(), called on every rank before log()."
        )
    local: Tensor = value.to_local()  # type: ignore[attr-defined]
    return local


def _number(value: Any) -> Any:
    """The Python number in a NumPy scalar or array of one element; anything else as it is."""
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "size", 0) == 1 and value.dtype.kind in "biuf":
        return value.item()
    return value


def plain_step(step: Any) -> int | None:
    """A step as an int; None stays None.

    Raises:
        ArgumentTypeError: it is not a whole number.
    """
    if step is None or type(step) is int:
        return step
    number = step.item() if hasattr(step, "item") and getattr(step, "ndim", 0) == 0 else step
    if isinstance(number, int | float) and number == int(number):
        return int(number)
    raise ArgumentTypeError(f"step takes a whole number, got {type(step).__name__}: {step!r:.80}.")


def flat(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Nested mappings as one, whose names are joined by `separator`."""
    joined: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            joined.update(
                {f"{name}{separator}{inner}": item for inner, item in flat(value, separator).items()}
            )
        else:
            joined[str(name)] = value
    return joined


def split_numbers(values: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The ints, floats and truth values among `values`, flat, and the names of the others."""
    numbers: dict[str, float] = {}
    others: list[str] = []
    for name, value in flat(values).items():
        if isinstance(value, int | float):
            numbers[name] = value
        else:
            others.append(name)
    return numbers, others


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that any engine can write: numbers, strings, booleans, None, and lists and mappings of these.

    Anything else, such as a path or an enum, becomes its `str()`.
    """
    return {str(name): _storable(value) for name, value in plain(values).items()}


def _storable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_storable(_number(item)) for item in value]
    return value if type(value) in _PLAIN else str(value)
