"""Traversal of a model's module tree."""

from __future__ import annotations

from typing import Literal, overload

from torch import nn

__all__ = ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "get_module_children_bottom_up"]

# Layers that can store their weights in a lower precision and compute in a higher one.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[False] = False
) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """All modules of ``model``, children before their parent and siblings in order of registration.

    A module that occurs twice is listed once.

    Args:
        model: the root.
        return_fqns: return pairs of qualified name and module instead.
    """
    names = {module: name for name, module in model.named_modules()}
    ordered: list[tuple[str, nn.Module]] = []
    _list_bottom_up(model, names, set(), ordered)
    return ordered if return_fqns else [module for _, module in ordered]


def _list_bottom_up(
    module: nn.Module,
    names: dict[nn.Module, str],
    seen: set[nn.Module],
    ordered: list[tuple[str, nn.Module]],
) -> None:
    seen.add(module)
    for child in module.children():
        if child not in seen:
            _list_bottom_up(child, names, seen, ordered)
    ordered.append((names[module], module))
