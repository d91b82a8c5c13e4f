"""A table from names to classes, which are imported on first use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from accel_state.entry_points import entry_points, load
from accel_train.errors import OptionError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in and installed implementations of one kind, by name.

    Args:
        kind: the word for the kind in messages.
        group: entry-point group under which installed packages add theirs.
        builtins: name to `module:attribute`, the same form that an entry point has.
    """

    def __init__(self, kind: str, group: str, builtins: Mapping[str, str]) -> None:
        self._kind = kind
        self._group = group
        self._builtins = dict(builtins)

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._builtins, *self._installed()})

    def get(self, name: str) -> T:
        """Return the implementation called `name`.

        Raises:
            OptionError: there is none; the message has the known names and the nearest one.
        """
        place = self._builtins.get(name) or self._installed().get(name)
        if place is None:
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"Unknown {self._kind} {name!r}; known: {', '.join(self.names())}.{hint}")
        return cast(T, load(place))

    def _installed(self) -> Mapping[str, str]:
        return entry_points(self._group)
