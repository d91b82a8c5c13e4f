"""Keyword arguments for objects that the library creates for the user. Loads no torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accel_state.environment import clear_environment

__all__ = ["InitProcessGroupKwargs", "KwargsHandler"]


class KwargsHandler:
    """Base of dataclasses that hold the keyword arguments of an object created later."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from those of a handler built without arguments in an empty environment."""
        with clear_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


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
