"""Base of the autocast precisions: a reversible wrapper around `forward`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.trees import convert_to_fp32
from accel_train.precision.base import DTypePolicy, Precision

__all__ = ["AutocastForward", "AutocastPrecision", "PrecisionForward", "restore_forward"]


class PrecisionForward:
    """A model's forward, wrapped in a precision."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        return self.forward(*args, **kwargs)


class AutocastForward(PrecisionForward):
    """A model's forward under autocast; floating-point outputs are converted to float32.

    A new autocast context per call keeps it correct when it is entered again (activation checkpointing runs forward
    inside backward) and after an exception.
    """

    def __init__(
        self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype, cache_enabled: bool
    ) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.device_type = device_type
        self.dtype = dtype
        self.cache_enabled = cache_enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, floating tensors in them as float32."""
        with torch.autocast(self.device_type, self.dtype, cache_enabled=self.cache_enabled):
            outputs = self.forward(*args, **kwargs)
        if type(outputs) is torch.Tensor:
            return outputs.float() if outputs.dtype in _LOW else outputs
        return convert_to_fp32(outputs)


_LOW = (torch.bfloat16, torch.float16)


class AutocastPrecision(Precision):
    """Base of precisions that run forward under autocast in `dtype`; parameters keep their dtype."""

    dtype: ClassVar[torch.dtype | None]

    @property
    def _low(self) -> torch.dtype:
        assert self.dtype is not None
        return self.dtype

    @property
    def dtypes(self) -> DTypePolicy:
        """The dtypes: parameters keep theirs, computation in `dtype`, outputs in float32."""
        return DTypePolicy(compute=self._low, output=torch.float32)

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[object]:
        """`torch.autocast` in this precision's dtype; a context that does nothing while autocast is off."""
        if not self.uses_autocast:
            return contextlib.nullcontext()
        return torch.autocast(
            self.options.device_type, self._low, enabled=enabled, cache_enabled=cache_enabled
        )

    def convert(self, model: nn.Module) -> nn.Module:
        """Put `wrap(…)` around `model.forward`; the original stays in `model._original_forward`."""
        original = model.forward
        if isinstance(original, PrecisionForward):
            return model
        wrapped = self.wrap(model, original)
        if wrapped is not original:
            model._original_forward = original  # type: ignore[assignment]
            model.forward = wrapped
        return model

    def wrap(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a model under autocast; `forward` itself while autocast is off."""
        if not self.uses_autocast or not self.options.autocast_enabled:
            return forward
        cache_enabled = self.options.cache_enabled
        if cache_enabled is None:
            cache_enabled = torch.is_autocast_cache_enabled()
        return AutocastForward(forward, self.options.device_type, self._low, cache_enabled)

    def restore(self, model: nn.Module) -> None:
        """Restore the original forward; the model pickles again."""
        restore_forward(model)


def restore_forward(model: nn.Module) -> None:
    """Undo `AutocastPrecision.convert`, whichever accelerator did it."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    # A plain method comes back through the class; an earlier instance attribute is restored.
    if getattr(original, "__self__", None) is model and original.__func__ is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original
