"""The device map of a quantised model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import Sizes, memory_budgets
from accel_bigmodel.device_maps.checks import check_device_map
from accel_bigmodel.device_maps.infer import MODES, resolve_device_map
from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_bigmodel.quantization.engine import Engine
from accel_bigmodel.quantization.selection import SelectedLayer, is_named, kept_in_float32, select_layers
from accel_bigmodel.quantization.support import OFFLOADED, check_support
from accel_state.host.devices import default_device

__all__ = ["Device", "PartDevices", "check_sizes", "get_quantized_model_device_map"]

Device = int | str | torch.device

CPU = torch.device("cpu")


class PartDevices:
    """Looks up the devices of single names in a device map.

    Args:
        device_map: name of a module or tensor → device; covers all parameters, with existing devices.
    """

    def __init__(self, device_map: Mapping[str, Device]) -> None:
        self.device_map = dict(device_map)
        self._devices = {name: _with_index(place) for name, place in device_map.items()}

    @property
    def main(self) -> torch.device:
        """The device that computes with offloaded weights: the first of the map that is not the CPU, else the CPU."""
        return next((device for device in self._devices.values() if device not in (None, CPU)), None) or CPU

    @property
    def are_several(self) -> bool:
        """Whether parts are on different devices."""
        return len({*self._devices.values()}) > 1

    def of(self, name: str) -> torch.device:
        """The device of a module or tensor; the CPU for those on disk."""
        return self._find(name) or CPU

    def is_on_disk(self, name: str) -> bool:
        """Whether a module or tensor is kept on disk."""
        return self._find(name) is None

    def kind(self, name: str) -> str:
        """The device of a module as the support table names it: its type, or ``"offloaded"``."""
        device = self._find(name)
        is_offloaded = device is None or (device == CPU and self.main != CPU)
        return OFFLOADED if is_offloaded or device is None else device.type

    def _find(self, name: str) -> torch.device | None:
        fitting = [key for key in self._devices if key == "" or name == key or name.startswith(f"{key}.")]
        # Only non-persistent buffers may be missing from a map.
        return self._devices[max(fitting, key=len)] if fitting else self.main


def _with_index(place: Device) -> torch.device | None:
    return None if place == "disk" else torch.empty(0, device=place).device


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    device_map: Mapping[str, Device] | Device | None = None,
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
) -> dict[str, Device]:
    """Compute the device map of a model whose linear layers will be quantised.

    Args:
        model: not quantised yet, on any device.
        bnb_quantization_config: configuration for any engine.
        device_map: a map; a device for the whole model; ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or
            ``"sequential"``, which infer one. ``None``: the accelerator, or the CPU if there is none.
        max_memory: bytes by device, for an inferred map.
        no_split_module_classes: classes whose modules stay whole, for an inferred map.

    Raises:
        DeviceMapError: the map omits a tensor, names something that does not exist, or splits tied weights.
        QuantizationError: a layer to quantise would be offloaded to the host or disk.
    """
    config = bnb_quantization_config
    layers = select_layers(model, config)
    found: dict[str, Device]
    if isinstance(device_map, Mapping):
        found = dict(device_map)
    elif isinstance(device_map, str) and device_map in MODES:
        found = _inferred(model, config, layers, device_map, max_memory, no_split_module_classes)
    else:
        found = {"": _current_device() if device_map is None else device_map}
    check_device_map(model, found, strict=True)
    places = PartDevices(found)
    for layer in layers:
        for name in layer.names:
            try:
                check_support(config.format, places.kind(name))
            except QuantizationError as error:
                raise QuantizationError(f"{name}: {error}") from error
    return found


def _current_device() -> Device:
    device = default_device()
    return "cpu" if device.type == "cpu" else torch.accelerator.current_device_index()


def _inferred(
    model: nn.Module,
    config: QuantizationConfig,
    layers: Sequence[SelectedLayer],
    mode: str,
    max_memory: Sizes | None,
    no_split_module_classes: str | Iterable[str] | None,
) -> dict[str, Device]:
    quantized = {f"{name}.weight" for layer in layers for name in layer.names}
    keep = kept_in_float32(model, config)
    special = {
        name: torch.float32 if is_named(name, keep) else config.dtype
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name not in quantized and tensor.dtype.is_floating_point
    }
    # Scales take memory besides the weights.
    budgets = {device: size / (1 + config.overhead) for device, size in memory_budgets(max_memory).items()}
    return dict(resolve_device_map(model, mode, budgets, no_split_module_classes, config.stored_as, special))


def check_sizes(
    layers: Iterable[SelectedLayer], places: PartDevices, engine: Engine, config: QuantizationConfig
) -> None:
    """Refuse layers that the engine cannot quantise on their device.

    Raises:
        QuantizationError: names all of them with reasons.
    """
    found = {layer.names[0]: engine.why_not(layer.module, places.of(layer.names[0])) for layer in layers}
    refused = {name: reason for name, reason in found.items() if reason is not None}
    if refused:
        raise QuantizationError(
            f"{config.format}: {'; '.join(f'{name} {reason}' for name, reason in refused.items())}. To leave them "
            f"unquantised, add these to skip_modules: {list(refused)}"
        )
