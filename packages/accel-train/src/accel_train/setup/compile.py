"""torch.compile for prepared models: the whole model, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from accel_train.plugins import TorchDynamoPlugin
from accel_train.setup.unwrap import has_compiled_regions
from accel_train.strategies.blocks import repeated_blocks
from accel_train.strategies.wrappers import is_compiled_module

__all__ = ["compile_model", "compile_regions"]


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin, *, in_place: bool = False) -> nn.Module:
    """Compile a model with the plugin's options; a compiled model stays as it is.

    Args:
        model: the model.
        plugin: whether and how.
        in_place: put no wrapper around it.

    Returns:
        The compiled module, or `model` itself if compilation is off or its blocks were compiled in place.
    """
    if not plugin.enabled or is_compiled_module(model) or has_compiled_regions(model):
        return model
    kwargs = plugin.to_kwargs()
    kwargs["backend"] = plugin.compiler
    if plugin.use_regional_compilation:
        return compile_regions(model, **kwargs)
    if in_place:
        model.compile(**kwargs)
        return model
    return cast(nn.Module, torch.compile(model, **kwargs))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a model in place.

    The blocks of a `ModuleList` of one class share their code, so the compiler compiles each kind only once, however
    often it is repeated; the modules around them stay eager. Names in the state dict do not change. A model without
    repeated blocks is compiled whole, in place.

    Args:
        module: the model to change.
        compile_kwargs: arguments of `torch.compile`.

    Returns:
        The same model.
    """
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    # `module.compile()` would compile nothing of a class of torch.nn, such as `nn.Sequential`.
    for block in repeated_blocks(module) or [module]:
        kind = type(block)
        if kind not in compiled:
            compiled[kind] = torch.compile(_call_of(kind), **compile_kwargs)
        # nn.Module.__call__ runs this in place of _call_impl; one compiled function per kind is one cache per kind.
        block._compiled_call_impl = _Bound(compiled[kind], block)
    return module


def _call_of(kind: type[nn.Module]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cast(Any, module)._call_impl(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"call_{kind.__name__}"
    # Dynamo's cache belongs to the code object; a copy per class keeps one class from filling another's.
    call.__code__ = call.__code__.replace(co_name=call.__name__)
    return call


class _Bound:
    """A compiled function bound to the block whose call it replaces."""

    def __init__(self, function: Callable[..., Any], block: nn.Module) -> None:
        self.function = function
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.block, *args, **kwargs)
