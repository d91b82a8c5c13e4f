"""Wrappers of a module's forward, which make its weights available before it and release them after it."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from accel_bigmodel.hooks.base import forwards_of

__all__ = ["ForwardWrapper", "WeightStream", "wrappers_of"]


class WeightStream(Protocol):
    """The methods that a wrapper calls around a forward, of :class:`~accel_bigmodel.streaming.streamer.Streamer`."""

    turn: threading.RLock
    """Held during a forward, before ``lock``: models that share weights run one at a time."""
    lock: threading.RLock
    """Held during a forward of the model."""

    @property
    def device(self) -> torch.device:
        """The device that weights are copied to."""

    def is_running(self) -> bool:
        """Whether this thread is in a forward of the model."""

    def is_copied(self, memo: dict[int, Any]) -> bool:
        """Whether ``copy.deepcopy``, whose memo this is, copies the whole model."""

    def open(self, key: Hashable, order: Sequence[int], outermost: bool) -> None:
        """A forward begins that may use these groups, by default in this order."""

    def close(self, outermost: bool, orderly: bool, complete: bool) -> None:
        """A forward ended that may have used groups."""

    def enter(self, group: int) -> None:
        """A group's module needs its weights now."""

    def leave(self, group: int) -> None:
        """A group's module has run."""

    def saving(self) -> AbstractContextManager[Any]:
        """Surrounds a forward that autograd records."""

    def owned(self, group: int, result: Any) -> Any:
        """The result of a group's module, without views of device memory that is reused."""


class ForwardWrapper:
    """Replaces ``module.forward``.

    Not a pair of forward hooks: PyTorch does not call those after a keyboard interrupt, nor where ``module.forward`` is
    called directly.

    Args:
        streamer: is called around the forward.
        module: whose forward is wrapped.
        group: number of the group that the module needs; ``None`` if it only contains such modules.
        below: numbers of the groups of the module and its submodules, in module order.
    """

    def __init__(
        self, streamer: WeightStream, module: nn.Module, group: int | None, below: Sequence[int]
    ) -> None:
        self._streamer: WeightStream | None = streamer
        self._module = module
        self._group = group
        self.below = tuple(below)
        # A forward that others set on the module is part of the chain; that of the class is looked up.
        self._inner: Callable[..., Any] | None = module.__dict__.get("forward")
        while (
            isinstance(self._inner, ForwardWrapper) and not self._inner.is_active()
        ):  # left beneath a wrapper that was removed later
            self._inner = self._inner._inner
        self._bind()
        module.__dict__["forward"] = self

    def _bind(self) -> None:
        self._forward = self._inner or MethodType(type(self._module).forward, self._module)
        functools.update_wrapper(self, self._forward, updated=())  # for inspect.signature

    def __getstate__(self) -> dict[str, Any]:
        names = ("_streamer", "_module", "_group", "below", "_inner")
        return {name: self.__dict__[name] for name in names}

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardWrapper:
        new = memo[id(self)] = object.__new__(type(self))
        state = self.__getstate__()
        # A copy of a part of the model is plain: its own streamer would need a copy of the whole model.
        if self._streamer is not None and not self._streamer.is_copied(memo):
            state["_streamer"] = None
        new.__setstate__(copy.deepcopy(state, memo))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with the weights it needs."""
        streamer = self._streamer
        if streamer is None:
            return self._forward(*args, **kwargs)
        outermost = not streamer.is_running()
        with streamer.turn, streamer.lock:
            orderly = complete = False
            try:
                streamer.open(self, self.below, outermost)
                if self._group is None:
                    result = self._forward(*args, **kwargs)
                else:
                    result = self._with_weights(streamer, self._group, args, kwargs)
                orderly = complete = True
                return result
            except Exception:
                orderly = True
                raise
            finally:
                streamer.close(outermost, orderly, complete)

    def _with_weights(
        self, streamer: WeightStream, group: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            streamer.enter(group)
            if not torch.is_grad_enabled():
                return streamer.owned(group, self._forward(*args, **kwargs))
            with streamer.saving():
                return streamer.owned(group, self._forward(*args, **kwargs))
        finally:
            streamer.leave(group)

    @property
    def offload(self) -> bool:
        """Whether it provides the weights of its module; ``has_offloaded_params`` reads this."""
        return self._streamer is not None and self._group is not None

    @property
    def execution_device(self) -> torch.device | None:
        """The device of the weights during a forward."""
        return None if self._streamer is None else self._streamer.device

    def is_active(self) -> bool:
        """Whether a streamer is attached."""
        return self._streamer is not None

    def belongs_to(self, streamer: WeightStream | None) -> bool:
        """Whether this streamer is attached."""
        return self._streamer is streamer

    def remove(self) -> None:
        """Remove it from the module; if something wraps it by now, it stays and only passes calls on.

        Hooks, which keep what they wrap as ``_old_forward``, are updated, so that removing them does not bring it back.
        """
        self._streamer = None
        if self._module.__dict__.get("_old_forward") is self:
            self._module.__dict__["_old_forward"] = self._forward
        if self._module.__dict__.get("forward") is self:
            if self._inner is None:
                del self._module.__dict__["forward"]
            else:
                self._module.__dict__["forward"] = self._inner


def wrappers_of(module: nn.Module) -> list[ForwardWrapper]:
    """The wrappers on a module, including those beneath hooks and other wrappers that set ``__wrapped__``."""
    return [forward for forward in forwards_of(module) if isinstance(forward, ForwardWrapper)]
