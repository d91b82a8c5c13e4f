"""States of torchao's low-bit optimizers, which are tensors made of others, as plain tensors and back."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["pack_low_bit", "unpack_low_bit"]

_KEY = "torchao"
# A file only chooses among these, so reading it imports nothing else.
_HOMES = {
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def pack_low_bit(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with a dictionary of plain tensors and data in the place of each low-bit tensor."""
    return {key: _packed(value) for key, value in state.items()}


def unpack_low_bit(state: Any) -> Any:
    """The inverse of `pack_low_bit`; anything else comes back as it is."""
    if not isinstance(state, Mapping) or not any(map(_is_packed, state.values())):
        return state
    return {key: _unpacked(value) if _is_packed(value) else value for key, value in state.items()}


def _packed(value: Any) -> Any:
    kind = type(value)
    if _HOMES.get(kind.__name__) != kind.__module__:
        return value
    names, attributes = value.__tensor_flatten__()
    return {
        _KEY: kind.__name__,
        "attributes": [tuple(item) if isinstance(item, torch.Size) else item for item in attributes],
        "tensors": {name: getattr(value, name) for name in names},
    }


def _is_packed(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get(_KEY) in _HOMES and "tensors" in value


def _unpacked(value: Mapping[str, Any]) -> Any:
    kind: Any = getattr(importlib.import_module(_HOMES[value[_KEY]]), value[_KEY])
    attributes = [torch.Size(item) if isinstance(item, tuple) else item for item in value["attributes"]]
    return kind.__tensor_unflatten__(dict(value["tensors"]), attributes)
