"""Adding hooks that align devices to all modules of a model that need one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.containers import is_container
from accel_bigmodel.hooks.align import AlignDevicesHook, TiedParams, align_inputs
from accel_bigmodel.hooks.base import ModelHook, add_hook_to_module, hook_of, put_hook
from accel_bigmodel.hooks.devices import concrete_device
from accel_bigmodel.hooks.offloaded_tensors import tensor_locations
from accel_bigmodel.offload_files import PrefixedDataset

__all__ = ["attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook"]

Device = int | str | torch.device
_Addition = tuple[nn.Module, AlignDevicesHook, bool]
"""Module, hook, whether it is appended."""


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Move a module and everything in it to a device, and make each submodule move its inputs there.

    Submodules that have a hook already, or have an empty state dict, get none.

    Args:
        module: changed in place.
        execution_device: device for weights and inputs.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        preload_module_classes: names of classes whose submodules are not called themselves, so need no hook.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    common = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    _add_all(_placing(module, execution_device, preload_module_classes, common, offloaded=False))


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
    """Put an :class:`AlignDevicesHook` on every submodule that has its own tensors, after existing hooks.

    Args:
        module: changed in place.
        execution_device: device of weights and inputs during a forward.
        offload: load the weights from ``weights_map`` for the duration of each forward.
        weights_map: values by name, from the model down.
        offload_buffers: offload persistent buffers too.
        module_name: the name of ``module`` in ``weights_map``; empty for the model itself.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        preload_module_classes: names of classes that use the weights of their submodules without calling them: all
            their weights are loaded before their forward.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    options = {
        "execution_device": execution_device,
        "offload": offload,
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "tied_params_map": tied_params_map,
    }
    _add_all(_aligning(module, module_name, weights_map, preload_module_classes, options, set()))


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
    """Put hooks on a model whose blocks compute on different devices, or of which only some are offloaded.

    With mappings, each named block is placed or offloaded according to its entry, and the outermost module moves its
    output back to the device of its input.

    Args:
        module: changed in place.
        execution_device: one device for all, or devices by name of the block.
        offload: one value for all, or values by name of the block.
        weights_map: values of offloaded weights by name, relative to the model.
        offload_buffers: offload persistent buffers too.
        module_name: the name of ``module`` in the mappings; empty for the model itself.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        preload_module_classes: as for :func:`attach_align_device_hook`.
        tied_params_map: as for :class:`AlignDevicesHook`.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloaded: dict[str, Any] = {**common, "offload": True, "offload_buffers": offload_buffers}
    seen: set[nn.Module] = set()

    def offloading(block: nn.Module, name: str, device: Device | None) -> Iterator[_Addition]:
        options = {**offloaded, "execution_device": device}
        return _aligning(block, name, weights_map, preload_module_classes, options, seen)

    def additions() -> Iterator[_Addition]:
        if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
            if offload:
                yield from offloading(module, module_name, execution_device)
            else:
                hook = AlignDevicesHook(
                    execution_device, io_same_device=True, place_submodules=True, **common
                )
                yield module, hook, False
            return
        devices, offloads = _by_name(execution_device, offload)
        for device in devices.values():
            if device is not None:
                concrete_device(device)  # raises before anything has moved
        for name, block in _blocks(module, module_name):
            device = devices.get(name)
            if name not in devices or name not in offloads:
                if name == "":
                    yield block, AlignDevicesHook(device, io_same_device=True, **common), False
                continue
            if offloads[name]:
                if name == "":
                    yield block, align_inputs(device, io_same_device=True, skip_keys=skip_keys), True
                yield from offloading(block, name, device)
                if hook_of(block) is None:
                    yield block, AlignDevicesHook(device, **common), False
            else:
                hook = AlignDevicesHook(
                    device,
                    offload_buffers=offload_buffers,
                    io_same_device=name == "",
                    place_submodules=True,
                    **common,
                )
                yield block, hook, False
            if device is not None:
                classes = preload_module_classes if offloads[name] else None
                yield from _placing(block, device, classes, common, offloaded=offloads[name])

    _add_all(additions())


def _placing(
    module: nn.Module,
    device: Device,
    preload_module_classes: Collection[str] | None,
    common: dict[str, Any],
    *,
    offloaded: bool,
) -> Iterator[_Addition]:
    # Offloaded tensors of a module without a hook are loaded by the module that contains it.
    loaded_by_parent = offloaded and tensor_locations(module, recurse=False)
    if hook_of(module) is None and _has_state(module) and not loaded_by_parent:
        yield module, AlignDevicesHook(device, **common), False
    whole = _offloads_whole if offloaded else _is_one_of
    if not whole(module, preload_module_classes):
        for child in module.children():
            yield from _placing(child, device, preload_module_classes, common, offloaded=offloaded)


def _aligning(
    module: nn.Module,
    name: str,
    weights_map: Mapping[str, Tensor] | None,
    preload_module_classes: Collection[str] | None,
    options: dict[str, Any],
    seen: set[nn.Module],
) -> Iterator[_Addition]:
    if module in seen:  # the model contains it twice
        return
    seen.add(module)
    whole = options["offload"] and _offloads_whole(module, preload_module_classes)
    prefix = f"{name}." if name else ""
    if whole or tensor_locations(module, recurse=False):
        mine = None if weights_map is None else PrefixedDataset(weights_map, prefix)
        yield module, AlignDevicesHook(weights_map=mine, place_submodules=whole, **options), True
    if not whole:
        for child_name, child in _called_children(module, prefix):
            yield from _aligning(child, child_name, weights_map, preload_module_classes, options, seen)


def _called_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module; containers, whose hooks would never run, are replaced by their children."""
    for name, child in module.named_children():
        if is_container(child):
            yield from _called_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _add_all(additions: Iterable[_Addition]) -> None:
    """Add hooks in order, each with the previous ones in effect; on an error all are removed again."""
    done: list[tuple[nn.Module, AlignDevicesHook, ModelHook | None, bool]] = []
    try:
        for module, hook, append in additions:
            before = hook_of(module)
            add_hook_to_module(module, hook, append=append)
            done.append((module, hook, before, append))
    except BaseException:
        for module, hook, before, append in reversed(done):
            hook.detach_hook(module)
            put_hook(module, before)
            if before is not None and not append:
                before.init_hook(module)
        raise


def _by_name(
    execution_device: Device | Mapping[str, Device] | None, offload: bool | Mapping[str, bool]
) -> tuple[Mapping[str, Device | None], Mapping[str, bool]]:
    if isinstance(execution_device, Mapping):
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)
        return execution_device, offloads
    assert isinstance(offload, Mapping)
    return dict.fromkeys(offload, execution_device), offload


def _blocks(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The module and its submodules, outermost first; a shared one under each of its names."""
    return list(module.named_modules(prefix=name, remove_duplicate=False))


def _is_one_of(module: nn.Module, classes: Collection[str] | None) -> bool:
    names = (classes,) if isinstance(classes, str) else classes or ()
    return type(module).__name__ in names


def _offloads_whole(module: nn.Module, classes: Collection[str] | None) -> bool:
    # Attention of torch computes with the weights of its output layer without calling it.
    return _is_one_of(module, classes) or isinstance(module, nn.MultiheadAttention)


def _has_state(module: nn.Module) -> bool:
    """Whether the state dict has an entry, without building it."""
    return any(True for _ in module.parameters()) or any(
        buffer is not None and leaf not in owner._non_persistent_buffers_set
        for owner in module.modules()
        for leaf, buffer in owner._buffers.items()
    )
