"""Prepared loaders that torchdata's `StatefulDataLoader` counts as its instances.

Clients ask with ``isinstance(loader, StatefulDataLoader)`` whether a loader continues inside the epoch by itself.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from accel_state.host.available import is_torchdata_stateful_dataloader_available

__all__ = ["TorchdataInstance"]


class TorchdataInstance:
    """Answers `isinstance` for torchdata's class too, if a loaded state continues inside the epoch.

    Nothing of torchdata runs, because nothing is inherited from it. Where it is not installed, nobody can ask.
    """

    use_stateful_dataloader: bool = False

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """What `isinstance` looks at after the type."""
        return (_torchdata_class() if self.use_stateful_dataloader else None) or type(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle and copy would compare the type with what `__class__` says.
        return _empty, (type(self),), self.__getstate__()


@functools.cache
def _torchdata_class() -> type[Any] | None:
    if not is_torchdata_stateful_dataloader_available():
        return None
    found: type[Any] = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return found


def _empty(kind: type[Any]) -> Any:
    """An object to be filled with a state."""
    return object.__new__(kind)
