"""Layerwise casting: weights stored in a small dtype, and converted to a larger one for each layer's forward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.base import ModelHook, add_hook_to_module, outside_graphs
from accel_bigmodel.hooks.offloaded_tensors import (
    BORROW_LOCK,
    Borrowed,
    TensorLocation,
    tensor_locations,
    wrapped_like,
)
from accel_state.messages import warn

__all__ = ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

# Layers whose weights dominate a model and whose kernels need them in the dtype of the inputs.
_CASTABLE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


# Modules of torch that compute with the weights of their layers without calling them.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LayerwiseCastingHook(ModelHook):
    """Hook that stores the floating-point tensors of a module in one dtype, and computes with copies in another.

    The stored values are never written back, so calls do not change them. When the hook is removed, tensors get their
    original dtypes back, but not the precision lost by storing them.

    Args:
        storage_dtype: dtype between calls, such as ``torch.float8_e4m3fn``.
        compute_dtype: dtype during forward, such as ``torch.bfloat16``.
        non_blocking: as in ``Tensor.to``.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._before: list[tuple[TensorLocation, torch.dtype]] = []  # of all modules with this hook
        self._borrowed = Borrowed()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert to the storage dtype; parameters keep their identity."""
        locations = _floating(module)
        self._before += [(location, location.tensor.dtype) for location in locations]
        for location in locations:
            self._convert(location, self.storage_dtype)
        return module

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put copies in the compute dtype in place of the stored tensors."""
        with BORROW_LOCK:
            self._borrowed.begin()
            try:
                for location in _floating(module):
                    stored = location.tensor
                    if stored.dtype != self.compute_dtype:
                        copy = stored.detach().to(self.compute_dtype, non_blocking=self.non_blocking)
                        self._borrowed.put(location, wrapped_like(stored, copy))
            except BaseException:
                self._borrowed.end()
                raise
        return args, kwargs

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Free the copies."""
        self._borrowed.end()
        return output

    @outside_graphs
    def forward_failed(self, module: nn.Module) -> None:
        """Free the copies."""
        self._borrowed.end()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Convert back to the original dtypes."""
        self._borrowed.end_all()
        tables = {id(table) for owner in module.modules() for table in (owner._parameters, owner._buffers)}
        for location, dtype in self._before:
            if (
                id(location.table) in tables
                and not location.is_empty
                and location.tensor.dtype == self.storage_dtype
            ):
                self._convert(location, dtype)
        self._before = [entry for entry in self._before if id(entry[0].table) not in tables]
        return module

    def _convert(self, location: TensorLocation, dtype: torch.dtype) -> None:
        tensor = location.tensor
        if tensor.dtype != dtype:
            grad, tensor.grad = tensor.grad, None
            tensor.data = tensor.detach().to(dtype, non_blocking=self.non_blocking)
            tensor.grad = None if grad is None else grad.to(dtype)


def _floating(module: nn.Module) -> list[TensorLocation]:
    return [location for location in tensor_locations(module, True) if location.tensor.is_floating_point()]


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolutional layers in a small dtype, and compute with a larger one.

    A layer's weights exist in the larger dtype only during its own forward. A layer that shares a parameter with a
    module that is not cast, such as an embedding, is not cast either, with a warning. Nor are the layers inside torch's
    own attention and encoder layers (``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``), which use the weights
    without calling the layers.

    Args:
        module: changed in place; its hooks are kept.
        storage_dtype: dtype between calls, such as ``torch.float8_e4m3fn``.
        compute_dtype: dtype during forward, such as ``torch.bfloat16``.
        skip_modules_pattern: regular expressions; a module whose full name contains a match is not cast, nor are its
            submodules.
        skip_modules_classes: modules of these classes and their submodules are not cast.
        non_blocking: as in ``Tensor.to``.

    Raises:
        ValueError: a dtype is not a floating-point dtype, or PyTorch cannot convert to it; nothing was changed.
    """
    for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating-point dtype such as torch.bfloat16, got {dtype!r}")
        try:
            torch.zeros(1).to(dtype)
        except NotImplementedError as error:
            raise ValueError(f"{name}: PyTorch cannot convert weights to {dtype}") from error
    one = isinstance(skip_modules_pattern, str)
    patterns = [re.compile(p) for p in ([skip_modules_pattern] if one else skip_modules_pattern or ())]
    classes = (
        (skip_modules_classes,)
        if isinstance(skip_modules_classes, type)
        else tuple(skip_modules_classes or ())
    )

    layers = dict(_castable_layers(module, "", patterns, classes))
    inside = {id(part) for layer in layers.values() for part in layer.modules()}
    others = [part for part in module.modules() if id(part) not in inside]
    needed = {id(parameter) for part in others for parameter in part.parameters(recurse=False)}
    shared = [name for name, layer in layers.items() if any(id(p) in needed for p in layer.parameters())]
    if shared:
        warn(
            f"{', '.join(shared)} keep their dtype, because they share parameters with modules that are not cast",
        )
    for name, layer in layers.items():
        if name not in shared:
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)


def _castable_layers(
    module: nn.Module, name: str, patterns: list[re.Pattern[str]], classes: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, (*classes, *_WHOLE)) or any(pattern.search(name) for pattern in patterns):
        return
    if isinstance(module, _CASTABLE):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _castable_layers(child, f"{name}.{child_name}" if name else child_name, patterns, classes)
