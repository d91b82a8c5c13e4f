"""Checks whether a user's device map fits the model and the machine."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import HOST_PLACES
from accel_bigmodel.device_maps.device_usage import device_of, entry_of, main_device_of
from accel_bigmodel.errors import DeviceMapError
from accel_ckpt.modules.devices import existing_device, parse_device
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.tensors import check_is_module
from accel_ckpt.modules.ties import find_tied_tensors, parent_and_leaf
from accel_state.messages import warn

__all__ = [
    "check_all_have_values",
    "check_device_map",
    "check_exists",
    "check_tied_parameters_on_same_device",
    "execution_device",
]

AnyDevice = int | str | torch.device
logger = logging.getLogger(__name__)
_NAMED = 8  # the most names that a message lists


def check_device_map(model: nn.Module, device_map: Mapping[str, AnyDevice], *, strict: bool = False) -> None:
    """Check that a map gives every parameter and persistent buffer a device.

    Args:
        model: on any device, also meta.
        device_map: devices by name of module or tensor.
        strict: refuse names that the model does not have (otherwise a warning), devices that this machine does not
            have, and maps under which tied parameters, or buffers that several modules share, compute on different
            devices.

    Raises:
        DeviceMapError: names tensors without a device, or what ``strict`` refuses; or ``device_map`` is not a map.
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    if not isinstance(device_map, Mapping):
        raise DeviceMapError(
            f"device_map is {device_map!r}; give a map from names of modules to devices, such as {{'': 'cpu'}}, or "
            "make one with infer_auto_device_map"
        )
    unknown = [name for name in device_map if not _has(model, name)]
    if unknown:
        message = _unknown_names(unknown, _all_names(model))
        if strict:
            raise DeviceMapError(message)
        warn(message)
    names = () if "" in device_map else _saved_names(model)
    uncovered = [name for name in names if entry_of(name, device_map) is None]
    if uncovered:
        raise DeviceMapError(
            "The device_map provided does not give any device for the following parameters: "
            f"{listed(uncovered)}. Name them or the modules that hold them; the name '' stands for the whole model"
        )
    if strict:
        for name, device in device_map.items():
            check_exists(device, f"the device_map puts {name!r} on")
        if len(set(device_map.values())) > 1:
            _check_ties(find_tied_tensors(model), device_map)


def check_all_have_values(device_map: Mapping[str, AnyDevice]) -> None:
    """Refuse a map for running a model that leaves a part of it on the meta device.

    Raises:
        DeviceMapError: names the parts.
    """
    if without := [name for name, place in device_map.items() if str(place) == "meta"]:
        raise DeviceMapError(
            f"the device map leaves {', '.join(map(repr, without))} without values ('meta'), so the model cannot run; "
            "to load parts of a model, use load_checkpoint_in_model"
        )


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, AnyDevice]
) -> None:
    """Warn about each group of tied parameters that a map puts on several devices.

    Raises:
        DeviceMapError: one of the parameters has no device in the map.
    """
    for group in tied_params:
        devices = {name: _device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Each device will hold its own copy; give them one "
                "device in the map, or use device_map='auto'.",
                devices,
            )


def execution_device(device: AnyDevice) -> torch.device | None:
    """The device that computes an entry of a map; None for ``"cpu"`` and ``"disk"``, which only hold weights.

    Raises:
        DeviceMapError: the entry is not a device.
    """
    if device in HOST_PLACES:
        return None
    found = parse_device(device, error=DeviceMapError)
    if found.type == "cpu":
        return None
    # PyTorch's stubs declare that there always is an index.
    index: int | None = found.index
    return torch.device(found.type, 0) if index is None and found.type != "meta" else found


def check_exists(device: AnyDevice, subject: str) -> None:
    """Refuse a device that this machine does not have.

    Args:
        device: as in a device map.
        subject: how the message begins, before the device.

    Raises:
        DeviceMapError: the device does not exist.
    """
    if device not in HOST_PLACES:
        existing_device(device, subject, error=DeviceMapError)


def _has(model: nn.Module, name: object) -> bool:
    """Whether a module, parameter or buffer has this name."""
    if not isinstance(name, str):  # the device, in a map with keys and values swapped
        return False
    if not name:
        return True
    try:
        owner, leaf = parent_and_leaf(model, name)
    except AttributeError:
        return False
    tables = (owner._modules, owner._parameters, owner._buffers)
    return any(table.get(leaf) is not None for table in tables)


def _all_names(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return names | {name for name, _ in model.named_buffers(remove_duplicate=False)}


def _unknown_names(unknown: Sequence[str], names: set[str]) -> str:
    listed = [repr(name) for name in unknown[:_NAMED]]
    # For the first only: usually all have the same mistake, and searching a large model's names takes a second.
    if close := difflib.get_close_matches(str(unknown[0]), names, n=1):
        listed[0] += f" (is {close[0]!r} meant?)"
    more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
    return (
        f"The following device_map keys do not match any submodules in the model: {', '.join(listed)}{more}"
    )


def _saved_names(model: nn.Module) -> Iterator[str]:
    """The names in a checkpoint; not from ``state_dict()``, which hooks of other libraries may change."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


def _device_of(name: str, device_map: Mapping[str, AnyDevice]) -> AnyDevice:
    entry = entry_of(name, device_map)
    if entry is None:
        raise DeviceMapError(f"the device_map gives no device for {name!r}, nor for a module that holds it")
    return device_map[entry]


def _check_ties(tied: Sequence[Sequence[str]], device_map: Mapping[str, AnyDevice]) -> None:
    places = {name: execution_device(device) or "cpu" for name, device in device_map.items()}
    main = main_device_of(places)
    for group in tied:
        devices = {name: device_of(name, device_map) for name in group}
        # Offloaded weights compute on the main device, where buffers are that no checkpoint has and the map may omit.
        computing = {main if (place := device_of(name, places)) in ("cpu", None) else place for name in group}
        if len(computing) > 1:
            listed = ", ".join(f"{name} on {device!r}" for name, device in devices.items())
            raise DeviceMapError(
                f"the device_map splits tied parameters: {listed}. Give them one device, or infer the map with "
                "infer_auto_device_map, which keeps them together"
            )
