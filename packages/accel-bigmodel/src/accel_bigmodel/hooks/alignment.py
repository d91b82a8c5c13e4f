"""Reading the weights of offloaded modules from outside: queries, temporary access, state dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks.align import AlignDevicesHook, moved_to
from accel_bigmodel.hooks.base import SequentialHook, forwards_of, hook_of
from accel_bigmodel.hooks.devices import concrete_device
from accel_ckpt.errors import UninitializedTensorError

__all__ = [
    "align_module_device",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
]


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook or wrapper on this module itself loads its parameters for each forward.

    True for a hook whose attribute ``offload`` is true, and for a wrapper of its ``forward`` with such an attribute,
    such as those that stream the weights of a dispatched model.
    """
    return bool(_offloading(module))


@contextlib.contextmanager
def align_module_device(
    module: nn.Module, execution_device: int | str | torch.device | None = None
) -> Iterator[None]:
    """Context in which the parameters of a module, not of its submodules, are on a device.

    Values that were loaded for the block are discarded after it, including changes; others move back and keep changes.

    Args:
        module: changed for the duration of the block; restored also when it raises.
        execution_device: default: the execution device of the hook that offloads the module; without such a hook
            nothing moves.
    """
    hooks = [hook for hook in _hooks_of(module) if isinstance(hook, AlignDevicesHook) and hook.offload]
    if hooks:
        with _brought(module, hooks[-1], execution_device):
            yield
        return
    offloading = _offloading(module)
    if execution_device is None and offloading:
        execution_device = getattr(offloading[-1], "execution_device", None)
    if execution_device is None:
        yield
        return
    with _moved(module, concrete_device(execution_device), keep_changes=not offloading):
        yield


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with its values in host memory, offloaded or not; tied entries share memory.

    Raises:
        UninitializedTensorError: a tensor has no values anywhere.
    """
    with contextlib.ExitStack() as borrowed:
        for module in model.modules():
            if has_offloaded_params(module):
                borrowed.enter_context(align_module_device(module, "cpu"))
        state_dict: dict[str, Any] = model.state_dict()
    missing = [name for name, value in state_dict.items() if isinstance(value, Tensor) and value.is_meta]
    if missing:
        raise UninitializedTensorError(
            f"these tensors have no values, so they cannot be saved: {', '.join(missing)}. Load them first"
        )
    return {
        name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in state_dict.items()
    }


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> MutableMapping[str, Any]:
    """Put the values of a module into the entries of a state dict.

    Args:
        module: offloaded or not; values that are not offloaded stay on their device.
        module_name: name of one of the module's parameters in ``state_dict``, such as ``"block.linear.weight"``.
        state_dict: changed in place; only its existing entries.
        device_to_put_offload: device of the values of an offloaded module.

    Returns:
        ``state_dict``.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for key, value in module.state_dict().items():
            if f"{prefix}{key}" in state_dict:
                state_dict[f"{prefix}{key}"] = value
    return state_dict


def _hooks_of(module: nn.Module) -> list[Any]:
    hook = hook_of(module)
    return [] if hook is None else _flat(hook)


def _flat(hook: Any) -> list[Any]:
    return (
        [part for each in hook.hooks for part in _flat(each)] if isinstance(hook, SequentialHook) else [hook]
    )


def _offloading(module: nn.Module) -> list[Any]:
    """The hooks and wrappers that load the parameters of a module."""
    return [each for each in [*_hooks_of(module), *forwards_of(module)] if getattr(each, "offload", False)]


@contextlib.contextmanager
def _brought(
    module: nn.Module, hook: AlignDevicesHook, device: int | str | torch.device | None
) -> Iterator[None]:
    own = hook.execution_device
    if device is not None:
        hook.execution_device = device
    try:
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.forward_failed(module)
    finally:
        hook.execution_device = own


@contextlib.contextmanager
def _moved(module: nn.Module, device: torch.device, *, keep_changes: bool) -> Iterator[None]:
    table: Any = module._parameters
    own = {name: (tensor, tensor.data) for name, tensor in table.items() if tensor is not None}
    empty = [name for name, (tensor, _) in own.items() if tensor.is_meta and device.type != "meta"]
    if empty:
        raise UninitializedTensorError(
            f"{', '.join(empty)} of this {type(module).__name__} have no values (meta device): load them, or, if the "
            "hook of a module that contains this one loads them, align that module instead"
        )
    for name, (tensor, _) in own.items():
        table[name] = moved_to(tensor, device)
    try:
        yield
    finally:
        for name, (tensor, data) in own.items():
            now = table.get(name)
            if now is None:
                continue
            # No values can be moved back from the meta device.
            if keep_changes and (not now.is_meta or data.is_meta):
                table[name] = moved_to(now, data.device)
            else:
                tensor.data = data
                table[name] = tensor
