"""Getting back the model that the user built."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from accel_train.precision.autocast import restore_forward
from accel_train.state import newest_strategy
from accel_train.strategies.base import Strategy
from accel_train.strategies.ddp import inside_parallel

__all__ = [
    "extract_model_from_parallel",
    "has_compiled_regions",
    "is_compiled_module",
    "plain_module",
    "unwrap",
]


def is_compiled_module(module: Any) -> bool:
    """Whether `module` is what `torch.compile(model)` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule) if _dynamo_loaded() else False


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether `module` or a module inside it was compiled in place (`module.compile()`) or wrapped."""
    return any(is_compiled_module(item) or _compiled_in_place(item) for item in module.modules())


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module inside wrappers of ddp and `torch.compile`, which stay as they are."""
    while True:
        inner = model._orig_mod if is_compiled_module(model) else inside_parallel(model)
        if inner is model:
            return model
        model = inner  # type: ignore[assignment]


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Take the wrappers off a prepared model: those of the newest `Accelerator`'s strategy, and those of ddp.

    Args:
        model: a prepared model, or any module.
        keep_fp32_wrapper: leave mixed precision on; False restores the model's own forward.
        keep_torch_compile: leave the model compiled; False gives the plain module.
        recursive: also unwrap parallel wrappers inside the model.

    Returns:
        The module inside ddp's wrapper, compiled again around it if it was compiled and should stay so.
    """
    return unwrap(newest_strategy(), model, keep_fp32_wrapper, keep_torch_compile, recursive)


def unwrap(
    strategy: Strategy | None,
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """`extract_model_from_parallel` for the models of a given strategy; None: for those that ddp wraps."""
    compiled = is_compiled_module(model)
    outer: nn.Module = model._orig_mod if compiled else model  # type: ignore[assignment]
    inner = _inside(strategy, outer)
    was_parallel = inner is not outer
    inner_compiled = is_compiled_module(inner)
    if inner_compiled and not keep_torch_compile:
        inner = inner._orig_mod  # type: ignore[assignment]
    if recursive:
        _unwrap_children(strategy, inner)
    if not keep_fp32_wrapper:
        plain = inner._orig_mod if is_compiled_module(inner) else inner
        restore_forward(plain)  # type: ignore[arg-type]
    if not keep_torch_compile:
        for item in inner.modules():
            if _compiled_in_place(item):
                item._compiled_call_impl = None
    if compiled and keep_torch_compile:
        if not was_parallel:
            return model
        # A wrapper of its own: `model` goes on reducing gradients.
        return type(model)(inner, model.dynamo_ctx)
    return inner


def _inside(strategy: Strategy | None, model: nn.Module) -> nn.Module:
    """The module inside all wrappers of a strategy, and of ddp."""
    while True:
        inner = inside_parallel(model if strategy is None else strategy.unwrap(model))
        if inner is model:
            return model
        model = inner


def _unwrap_children(strategy: Strategy | None, module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        inner = _inside(strategy, child)
        if inner is not child:
            setattr(module, name, inner)
        _unwrap_children(strategy, inner)


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _dynamo_loaded() -> bool:
    # Importing torch._dynamo takes a second; nothing is compiled before it has been imported.
    return "torch._dynamo" in sys.modules
