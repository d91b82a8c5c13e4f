"""Functions of ``accelerate.utils.fsdp_utils``, and of ``accelerate.utils.dataclasses`` about modules to wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accel_ckpt.modules.names import canonical_state_dict
from accel_ckpt.modules.tensors import set_data
from accel_ckpt.modules.ties import find_tied_parameters
from accel_train import Accelerator, FullyShardedDataParallelPlugin
from accel_train.errors import PrepareError
from accel_train.precision.fp16 import Scaler
from accel_train.strategies.fsdp2.activations import checkpoint_blocks, policy_of
from accel_train.strategies.fsdp2.units import find_units, ignored_parameters
from accel_train.strategies.gradients import any_divided


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class with that name in a tree of modules, parents before children; None if no module has it."""
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
        set_data(parameter, parameter.data.to(device))
    return parameters


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter of a model is divided among ranks (`DTensor`)."""
    return any_divided(model.parameters())


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Divide a model among ranks, and register it, as ``accelerator.prepare_model`` does.

    Raises:
        PrepareError: the accelerator uses another strategy than FSDP2.
    """
    if not accelerator.is_fsdp2:
        raise PrepareError(
            f"fsdp2_prepare_model() needs an Accelerator that uses FSDP2, and this one uses "
            f"{accelerator.strategy.name!r}. Pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())."
        )
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool]:
    """A function that decides whether a module of a model becomes a separate unit."""
    units = set(map(id, find_units(model, fsdp2_plugin)))
    return lambda module: id(module) in units


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Recompute the units of a model in backward if the plugin's ``activation_checkpointing`` is set; in place."""
    plugin = accelerator.state.fsdp_plugin
    checkpoint_blocks(
        model,
        find_units(model, plugin),
        plugin.activation_checkpointing_offload,
        policy_of(plugin.activation_checkpointing or True),
    )
    return model


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Give each rank its part of whole tensors that rank 0 has. Collective.

    Args:
        accelerator: not used; kept for the callers.
        model: a divided model.
        full_sd: whole tensors by name; empty on other ranks.
        cpu_offload: parts stay in host memory.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, dict(full_sd), options=options)


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Names without the parts that wrappers of checkpointing, compilation and parallelism add."""
    return canonical_state_dict(named_params)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """A gradient scaler for divided parameters, which may be in host memory."""
    return Scaler(**kwargs)


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """A function that makes a module's parameters as `param_init_fn` does, and ties those that were tied in a model.

    Args:
        param_init_fn: gives parameters of one module values, which may replace them.
        model: the model, before.
        device: not used; kept for the callers.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(parameters[name]) for names in find_tied_parameters(model) for name in names}
    kept = [
        parameter for parameter in parameters.values() if id(parameter) in tied
    ]  # an id is not used again
    made: dict[int, Tensor] = {}

    def make(module: nn.Module) -> Any:
        before = {
            name: id(value) for name, value in module.named_parameters(recurse=False) if id(value) in tied
        }
        result = param_init_fn(module)
        for name, key in before.items():
            setattr(module, name, made.setdefault(key, getattr(module, name)))
        return result

    return make if kept else param_init_fn
