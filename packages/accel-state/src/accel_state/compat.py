"""Helpers for plain Python objects that scripts written for Accelerate import."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

__all__ = ["convert_bytes", "get_pretty_name", "merge_dicts", "recursive_getattr"]


def convert_bytes(size: float) -> str:
    """A number of bytes in human-readable form: ``1536`` is ``"1.5 KB"``; units grow by 1024 up to PB."""
    units = ("bytes", "KB", "MB", "GB", "TB", "PB")
    index = 0
    while size >= 1024 and index < len(units) - 1:
        size /= 1024
        index += 1
    return f"{round(size, 2)} {units[index]}"


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a function or class, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    name: str = getattr(named, "__qualname__", None) or named.__name__
    return name


def merge_dicts(source: Mapping[Any, Any], destination: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Merge ``source`` into ``destination``, recursively for dicts under the same key, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at a dotted path, as in ``recursive_getattr(model, "layers.0.weight")``."""
    return functools.reduce(getattr, attr.split("."), obj)
