"""The places where a module's forward is surrounded: weights come before it and go after it, whatever happens."""

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
    """What a wrapper calls around a forward; :class:`~accel_bigmodel.streaming.streamer.Streamer` implements it."""

    turn: threading.RLock
    """Held during a forward, before ``lock``: models that share weights run one at a time."""
    lock: threading.RLock
    """Held during a forward of the model."""

    @property
    def device(self) -> torch.device:
        """Where the weights go."""

    def is_running(self) -> bool:
        """Whether this thread is in a forward of the model."""

    def is_copied(self, memo: dict[int, Any]) -> bool:
        """Whether ``copy.deepcopy``, whose memo this is, copies the whole model."""

    def open(self, key: Hashable, order: Sequence[int], outermost: bool) -> None:
        """A forward begins that may use these groups, by default in this order."""

    def close(self, outermost: bool, orderly: bool, complete: bool) -> None:
        """It ended."""

    def enter(self, group: int) -> None:
        """A group's module needs its weights now."""

    def leave(self, group: int) -> None:
        """A group's module has run."""

    def saving(self) -> AbstractContextManager[Any]:
        """Surrounds a forward that autograd records."""

    def owned(self, group: int, result: Any) -> Any:
        """The result of a group's module, without views of device memory that is reused."""


class ForwardWrapper:
    """Stands in for ``module.forward``.

    Not a pair of forward hooks: PyTorch calls none of these when a forward is interrupted from the keyboard, nor
    where ``module.forward`` is called directly.

    Args:
        streamer: whom it tells.
        module: whose forward it surrounds.
        group: number of the group that the module needs; ``None`` if it only contains such modules.
        below: numbers of the groups of the module and of those in it, in their order there.
    """

    def __init__(
        self, streamer: WeightStream, module: nn.Module, group: int | None, below: Sequence[int]
    ) -> None:
        self._streamer: WeightStream | None = streamer
        self._module = module
        self._group = group
        self.below = tuple(below)
        # A forward that somebody else put on the module is part of the chain; that of the class is found again.
        self._inner: Callable[..., Any] | None = module.__dict__.get("forward")
        while (
            isinstance(self._inner, ForwardWrapper) and not self._inner.is_active()
        ):  # left under a wrapper that went later
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
        # Who copies a part of the model gets a plain part: an engine of its own would bring a copy of the whole model.
        if self._streamer is not None and not self._streamer.is_copied(memo):
            state["_streamer"] = None
        new.__setstate__(copy.deepcopy(state, memo))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, with the weights it needs."""
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
        """Whether it brings the weights of its module; what ``has_offloaded_params`` asks."""
        return self._streamer is not None and self._group is not None

    @property
    def execution_device(self) -> torch.device | None:
        """Where it brings them."""
        return None if self._streamer is None else self._streamer.device

    def is_active(self) -> bool:
        """Whether it tells any engine."""
        return self._streamer is not None

    def belongs_to(self, streamer: WeightStream | None) -> bool:
        """Whether it tells this engine."""
        return self._streamer is streamer

    def remove(self) -> None:
        """Take it off the module; where somebody wrapped it meanwhile, it only passes calls on from now on.

        Hooks, which keep what they wrap as ``_old_forward``, leave no trace of it when they go.
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
    """The gates at a module, also those under hooks and under other wrappers that name what they wrap."""
    return [forward for forward in forwards_of(module) if isinstance(forward, ForwardWrapper)]
