"""A table of names whose classes are imported when they are asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from accel_train.errors import OptionError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in and installed implementations of one axis.

    Args:
        kind: the word for one of them in messages.
        group: entry-point group under which installed packages add theirs.
        builtins: name to `module:attribute`, the same form that an entry point has.
    """

    def __init__(self, kind: str, group: str, builtins: Mapping[str, str]) -> None:
        self._kind = kind
        self._group = group
        self._builtins = {name: EntryPoint(name, value, group) for name, value in builtins.items()}

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._builtins, *(point.name for point in entry_points(group=self._group))})

    def get(self, name: str) -> T:
        """The implementation called `name`.

        Raises:
            OptionError: there is none; names the known ones and the nearest.
        """
        point = self._builtins.get(name)
        if point is None:
            installed = [point for point in entry_points(group=self._group) if point.name == name]
            if not installed:
                near = difflib.get_close_matches(name, self.names(), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"Unknown {self._kind} {name!r}; known: {', '.join(self.names())}.{hint}")
            point = installed[0]
        module, _, attribute = point.value.partition(":")
        return cast(T, getattr(importlib.import_module(module), attribute))
