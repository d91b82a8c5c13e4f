"""Functions of ``accelerate.utils.fsdp_utils``, and of ``accelerate.utils.dataclasses`` about modules to wrap."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from accel_train.strategies.fsdp2.units import ignored_parameters
from accel_train.strategies.gradients import any_divided

__all__ = ["get_module_class_from_name", "get_parameters_from_modules", "model_has_dtensor"]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of that name of the first module in a tree that has one, parents before children; None without one."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def get_parameters_from_modules(
    modules: str | Iterable[nn.Module] | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of modules, moved to a device.

    Args:
        modules: modules of ``model``, or a regular expression for their whole names.
        model: the model.
        device: where the parameters go.
    """
    if modules is None:
        return set()
    parameters = ignored_parameters(model, modules)
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
    return parameters


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter of a model is divided among ranks (`DTensor`)."""
    return any_divided(model.parameters())
