"""Modules that wrap or divide a model: how they are recognised, and what is inside of wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from accel_ckpt.parts import fsdp_modules, is_sharded
from accel_train.errors import PrepareError

__all__ = ["innermost", "inside_compiled", "is_compiled_module", "is_sharded_by_script"]


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


def is_sharded_by_script(model: nn.Module) -> bool:
    """Whether the script has divided a model with `fully_shard`, which reduces its gradients by itself.

    Raises:
        PrepareError: it has divided the model in another way, so that ranks would need to read the same samples.
    """
    if next(fsdp_modules(model), None) is not None:
        return True
    divided = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if divided is not None:
        raise PrepareError(
            f"{type(model).__name__} is divided among ranks already ({divided!r} is a DTensor), and not by "
            "fully_shard: ranks that share a tensor must read the same samples, and this strategy gives each its own. "
            "Build the model without a tp_plan or device mesh."
        )
    return False
