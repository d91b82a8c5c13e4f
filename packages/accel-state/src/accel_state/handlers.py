"""Keyword arguments for objects that the library creates for the user. Loads no torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["InitProcessGroupKwargs", "KwargsHandler"]


class KwargsHandler:
    """Base of dataclasses that hold the keyword arguments of an object created later."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Declared default values by field name; they do not depend on the environment.

        Fields without a default are left out, and so are fields whose default a function computes, because it may
        depend on anything. A class as the factory (``list``, ``dict``) is called.
        """
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            factory: Any = field.default_factory
            if field.default is not dataclasses.MISSING:
                found[field.name] = field.default
            elif inspect.isclass(factory):
                found[field.name] = factory()
        return found

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if not name.startswith("_")})

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and those without one; see ``defaults``."""
        defaults = self.defaults()
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in defaults or defaults[name] != value
        }


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``.

    Attributes:
        backend: the communication library. The default selects the one for the device (NCCL on CUDA, Gloo on
            CPU, …), because only values that differ from a default are passed on.
        init_method: the rendezvous URL; by default MASTER_ADDR and MASTER_PORT.
        timeout: timeout of a collective; None: PyTorch's default, 10 minutes for NCCL, 30 for others.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None
