"""Unwrapping: getting back the model that the user built."""

from __future__ import annotations

import sys

from torch import nn

from accel_train.loop.state import newest_strategy
from accel_train.precision.restoring import restore_model
from accel_train.strategies.base import Strategy
from accel_train.strategies.ddp import inside_parallel
from accel_train.strategies.wrappers import innermost, inside_compiled, is_compiled_module

__all__ = [
    "extract_model_from_parallel",
    "has_compiled_regions",
    "is_peft_model",
    "plain_module",
    "unwrap",
]


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether `module` or a module inside it was compiled in place (`module.compile()`) or wrapped."""
    return any(is_compiled_module(item) or _compiled_in_place(item) for item in module.modules())


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model, inside any wrappers of strategies and of `torch.compile`."""
    peft = sys.modules.get("peft")  # a process with such a model has imported it
    if peft is None:
        return False
    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module inside wrappers of ddp and `torch.compile`, which stay as they are."""
    return innermost(model, inside_compiled, inside_parallel)


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Unwrap a prepared model: remove the wrappers of the newest `Accelerator`'s strategy, and those of ddp.

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
    """Unwrap a model of a given strategy, like `extract_model_from_parallel`; None: a model that ddp wraps."""
    compiled = is_compiled_module(model)
    outer = inside_compiled(model)
    inner = _inside(strategy, outer)
    was_parallel = inner is not outer
    if not keep_torch_compile:
        inner = inside_compiled(inner)
    if recursive:
        _unwrap_children(strategy, inner)
    if not keep_fp32_wrapper:
        restore_model(inside_compiled(inner))
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
    return innermost(model, inside_parallel, *(() if strategy is None else (strategy.unwrap,)))


def _unwrap_children(strategy: Strategy | None, module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        inner = _inside(strategy, child)
        if inner is not child:
            setattr(module, name, inner)
        _unwrap_children(strategy, inner)


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
