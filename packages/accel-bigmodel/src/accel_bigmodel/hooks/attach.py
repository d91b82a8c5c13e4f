"""Putting hooks that align devices on all modules of a model that need one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks.align import AlignDevicesHook, TiedParams
from accel_bigmodel.hooks.base import add_hook_to_module
from accel_bigmodel.offload_files import PrefixedDataset

__all__ = ["attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook"]

Device = int | str | torch.device


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Place a module and everything in it on a device, and let each submodule bring its inputs there.

    Submodules that have a hook already, or nothing in their state dict, get none.

    Args:
        module: changed in place.
        execution_device: where weights and inputs go.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        preload_module_classes: names of classes whose submodules are not called on their own, so need no hook.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and _has_state(module):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if _is_one_of(module, preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Put an :class:`AlignDevicesHook` on every submodule that has tensors of its own, after hooks that are there.

    Args:
        module: changed in place.
        execution_device: where weights and inputs are during a forward.
        offload: take the weights from ``weights_map`` for each forward only.
        weights_map: values by name, from the model down.
        offload_buffers: offload persistent buffers too.
        module_name: what ``module`` is called in ``weights_map``; empty for the model itself.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        preload_module_classes: names of classes that use the weights of their submodules without calling them: all
            their weights are brought before their forward.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    whole = offload and _is_one_of(module, preload_module_classes)
    if whole or _has_own_tensors(module):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Put hooks on a model whose blocks compute on different devices, or wait in different places.

    With mappings, each named block is placed, or offloaded, as its entry says, and the outermost module brings its
    output back to where its input was.

    Args:
        module: changed in place.
        execution_device: one for all, or by name of the block.
        offload: one for all, or by name of the block.
        weights_map: values of what is offloaded by name, from the model down.
        offload_buffers: offload persistent buffers too.
        module_name: what ``module`` is called in the mappings; empty for the model itself.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        preload_module_classes: as for :func:`attach_align_device_hook`.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloaded: dict[str, Any] = {
        **common,
        "offload": True,
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
    }
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module,
                execution_device,
                module_name=module_name,
                preload_module_classes=preload_module_classes,
                **offloaded,
            )
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **common)
            add_hook_to_module(module, hook)
        return
    devices, offloads = _by_name(execution_device, offload)
    for name, block in _blocks(module, module_name):
        device = devices.get(name)
        if name not in devices or name not in offloads:
            if name == "":
                add_hook_to_module(block, AlignDevicesHook(device, io_same_device=True, **common))
            continue
        if offloads[name]:
            if name == "":
                add_hook_to_module(
                    block, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys), append=True
                )
            attach_align_device_hook(
                block,
                device,
                module_name=name,
                preload_module_classes=preload_module_classes,
                **offloaded,
            )
            if not hasattr(block, "_hf_hook"):
                add_hook_to_module(block, AlignDevicesHook(device, **common))
        else:
            hook = AlignDevicesHook(
                device,
                offload_buffers=offload_buffers,
                io_same_device=name == "",
                place_submodules=True,
                **common,
            )
            add_hook_to_module(block, hook)
        if device is not None:
            classes = preload_module_classes if offloads[name] else None
            attach_execution_device_hook(block, device, preload_module_classes=classes, **common)


def _by_name(
    execution_device: Device | Mapping[str, Device] | None, offload: bool | Mapping[str, bool]
) -> tuple[Mapping[str, Device | None], Mapping[str, bool]]:
    if isinstance(execution_device, Mapping):
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)
        return execution_device, offloads
    assert isinstance(offload, Mapping)
    return dict.fromkeys(offload, execution_device), offload


def _blocks(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The module and all in it, outermost first; a shared one under each of its names."""
    return list(module.named_modules(prefix=name, remove_duplicate=False))


def _is_one_of(module: nn.Module, classes: Collection[str] | None) -> bool:
    names = (classes,) if isinstance(classes, str) else classes or ()
    return type(module).__name__ in names


def _has_own_tensors(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None for tensor in own)


def _has_state(module: nn.Module) -> bool:
    """Whether the state dict has an entry, without making one."""
    return any(True for _ in module.parameters()) or any(
        buffer is not None and leaf not in owner._non_persistent_buffers_set
        for owner in module.modules()
        for leaf, buffer in owner._buffers.items()
    )
