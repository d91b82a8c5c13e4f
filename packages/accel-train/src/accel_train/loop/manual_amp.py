"""Mixed precision for loops without prepared models; a prepared model applies it by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel_state.enums import DistributedType
from accel_state.trees import convert_to_fp32
from accel_state.world.process import PartialState
from accel_train.loop.state import AcceleratorState
from accel_train.plugins import AutocastKwargs
from accel_train.precision.fp16 import Scaler
from accel_train.precision.registry import PRECISIONS

__all__ = [
    "ConvertOutputsToFp32",
    "convert_outputs_to_fp32",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
]


class ConvertOutputsToFp32:
    """Wraps a function and converts its float16 and bfloat16 outputs to float32; a class, so that it can be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward)
        self.function = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return convert_to_fp32(self.function(*args, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConvertOutputsToFp32, (self.function,)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that float16 and bfloat16 tensors in its outputs, also nested ones, become float32."""
    return ConvertOutputsToFp32(model_forward)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create a `torch.amp.GradScaler` for this process's device.

    Args:
        distributed_type: how processes cooperate; all supported types use the same scaler.
        kwargs: arguments of the scaler.
    """
    return Scaler(PartialState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return an autocast context in the precision of the newest `Accelerator`; see also `Accelerator.autocast`.

    Args:
        native_amp: False returns a context that does nothing.
        autocast_kwargs: options of `torch.autocast`.

    Raises:
        StateError: there is no `Accelerator`.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    dtype = PRECISIONS.get(state.mixed_precision).dtype
    if dtype is None:
        return nullcontext()
    options = autocast_kwargs or AutocastKwargs()
    return torch.autocast(
        state.device.type, dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
    )
