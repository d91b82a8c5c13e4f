"""The wrapper of models that ddp trains: torch's DDP, which also records forwards and hides no attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_train.strategies.buckets import Buckets
from accel_train.strategies.wrappers import inside_compiled

__all__ = ["TransparentDDP", "ddp_of", "set_takes_buffers"]


class TransparentDDP(DistributedDataParallel):
    """DDP that passes attributes of the model through, as under strategies that do not wrap.

    A loss that a method computes bypasses DDP's forward, so its gradients are averaged afterwards; see `replicas.py`.

    Attributes:
        armed: a forward has prepared the reducer, and no backward has reached the model since. A forward without
            gradients changes nothing of it.
        buckets: finds the memory of gradients that are sent.
    """

    armed: bool
    buckets: Buckets

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["buckets"] = Buckets()
        super().__init__(*args, **kwargs)
        self.__dict__.update(armed=False, averages=True, is_built=True)
        self.__class__ = _WritesThrough  # not before, because DDP sets dozens of attributes of its own

    @property
    def require_forward_param_sync(self) -> bool:
        """DDP sets it in each forward: true if that has prepared the reducer, and the next one takes buffers over."""
        return bool(self.__dict__["takes_buffers"])

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, takes: bool) -> None:
        self.__dict__["takes_buffers"] = takes
        if takes:
            self.__dict__["armed"] = True

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        """Called once, when DDP is built: it forms its first buckets."""
        with self.buckets.formed():
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # as what it calls
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Called in each forward. After the first reduction DDP forms other buckets here, in the order of gradients."""
        if self._has_rebuilt_buckets or (self.find_unused_parameters and not self.static_graph):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        with self.buckets.formed():
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """See `DistributedDataParallel.register_comm_hook`."""
        super().register_comm_hook(state, hook)
        self.averages = False


class _WritesThrough(TransparentDDP):
    """A wrapper that is built; a copy of one is not until it has the attributes of the first."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # a copy has none yet
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that only the model has there: on the wrapper they would be read back and have no effect."""
        own = self.__dict__
        if "is_built" in own and name not in own and not hasattr(type(self), name) and name != "module":
            module = self.module
            if hasattr(module, name):
                setattr(module, name, value)
                return
        super().__setattr__(name, value)


for _class in (TransparentDDP, _WritesThrough):
    _class.__name__ = DistributedDataParallel.__name__  # by which people and programs recognise it


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, compiled or not; None if it has none."""
    inner = inside_compiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def set_takes_buffers(wrapped: DistributedDataParallel, takes: bool) -> None:
    """Set whether the next forward takes over buffers, if no forward has set it."""
    armed = getattr(wrapped, "armed", False)
    wrapped.require_forward_param_sync = takes
    if isinstance(wrapped, TransparentDDP):
        wrapped.armed = armed
