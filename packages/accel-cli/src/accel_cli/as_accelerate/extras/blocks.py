"""Names of ``accelerate.utils.other`` about repeated blocks and their compilation."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_train.setup.compile import compile_regions


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one class."""
    return isinstance(module, nn.ModuleList) and len({type(item) for item in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module, or one inside it, is a list of modules of one class."""
    return any(map(is_repeated_blocks, module.modules()))


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks in place, as ``compile_regions`` does; hooks that are added later run as well."""
    return compile_regions(module, **compile_kwargs)


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of an engine's module in place."""
    compile_regions(module, **compile_kwargs)
