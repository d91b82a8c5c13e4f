"""Modules that wrap a model: how `torch.compile`'s is recognised, and what is inside all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

__all__ = ["innermost", "inside_compiled", "is_compiled_module"]


def is_compiled_module(module: Any) -> bool:
    """Whether `module` is what `torch.compile(model)` returns."""
    # Importing torch._dynamo takes a second; nothing is compiled before it has been imported.
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.OptimizedModule)


def inside_compiled(model: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile`; `model` itself if it is none."""
    return cast(nn.Module, model._orig_mod) if is_compiled_module(model) else model


def innermost(model: nn.Module, *unwraps: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The module inside all wrappers, in whatever order they were put on.

    Args:
        model: a wrapper or a module.
        unwraps: each returns the module inside one kind of wrapper, and other modules as they are.
    """
    while True:
        inner = model
        for unwrap in unwraps:
            inner = unwrap(inner)
        if inner is model:
            return model
        model = inner
