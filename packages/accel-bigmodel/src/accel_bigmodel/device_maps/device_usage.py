"""The memory that a device map needs on each device, compared with the budgets.

A device needs the bytes that stay on it and room for the largest group of offloaded layers that passes through it. Such
a group is what moves at once: a module without submodules, a module of a class that stays whole, or all direct tensors
of a module. Explanations use the same counts, so they hold for maps that users wrote as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from accel_bigmodel.device_maps.budget import HOST_PLACES, DeviceKey
from accel_bigmodel.device_maps.greedy import main_devices
from accel_bigmodel.device_maps.model_outline import Outline
from accel_state.messages import readable_size

__all__ = ["Usage", "device_of", "entry_of", "main_device_of"]

DeviceT = TypeVar("DeviceT")
"""The values of a map: keys of budgets, or devices."""


def entry_of(name: str, device_map: Mapping[str, object]) -> str | None:
    """The innermost entry of a map that contains a module or tensor; None if there is none."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return name if name in device_map else None


def device_of(name: str, device_map: Mapping[str, DeviceT]) -> DeviceT | None:
    """The device of that entry."""
    entry = entry_of(name, device_map)
    return None if entry is None else device_map[entry]


def main_device_of(device_map: Mapping[str, DeviceT]) -> DeviceT | str:
    """The device that computes with offloaded weights: the first accelerator of the map, otherwise the CPU."""
    # As text, because torch.device("cpu") does not equal the string.
    return next((device for device in device_map.values() if str(device) not in HOST_PLACES), "cpu")


@dataclass(frozen=True)
class Usage:
    """Bytes that a map puts on devices, and bytes of offloaded layers that are copied through them."""

    used: Mapping[DeviceKey, int]
    kept: Mapping[DeviceKey, tuple[int, str]]
    """For devices through which offloaded layers pass: the bytes and name of the largest one."""
    buffers: int
    """Bytes of the buffers of offloaded modules."""
    split_ties: list[list[str]]
    """Groups of tied names that are not all on one device."""

    @classmethod
    def of(cls, outline: Outline, device_map: Mapping[str, DeviceKey]) -> Usage:
        """The usage of a map that covers every tensor."""
        used: dict[DeviceKey, int] = {}
        for name, size in outline.tensors():
            device = device_of(name, device_map)
            if device is not None:
                used[device] = used.get(device, 0) + size
        # Layers on cpu and disk pass through an accelerator, layers on disk through the CPU.
        main = main_device_of(device_map)
        kept: dict[DeviceKey, tuple[int, str]] = {}
        for device, sources in ((main, HOST_PLACES), ("cpu", ("disk",))):
            passing = [source for source in sources if source != device]
            groups = outline.groups(
                layer for layer in outline.layers() if device_of(layer[0], device_map) in passing
            )
            # A host without layers needs no room: it computes from mapped pages, which can be evicted.
            if groups and (device not in HOST_PLACES or used.get(device, 0)):
                largest = max(groups, key=groups.__getitem__)
                kept[device] = (groups[largest], largest)
        buffers = sum(
            outline.sizes.get(name, 0)
            for name, _ in outline.model.named_buffers()
            if device_of(name, device_map) in HOST_PLACES
        )
        apart = [group for group in outline.ties if len({device_of(name, device_map) for name in group}) > 1]
        return cls(used, kept, buffers, [list(group) for group in apart])

    def room(self, device: DeviceKey, budgets: Mapping[DeviceKey, float]) -> float:
        """Bytes left of a device's budget; negative if it is too small."""
        keeps = device in main_devices(budgets) or device not in HOST_PLACES
        kept = self.kept[device][0] if keeps and device in self.kept else 0
        return budgets.get(device, 0) - self.used.get(device, 0) - kept

    def complaints(self, budgets: Mapping[DeviceKey, float]) -> list[str]:
        """Problems of the map under these budgets, one sentence each."""
        found = []
        for device in {**self.used, **self.kept}:
            if self.room(device, budgets) < 0:
                used, (kept, name) = self.used.get(device, 0), self.kept.get(device, (0, ""))
                text = (
                    f"{device!r} has {_bytes(budgets.get(device, 0))}, and the map puts {_bytes(used)} on it"
                )
                if kept:
                    text += f" while {name!r} with {_bytes(kept)} must pass through it"
                found.append(text)
        return found + [
            f"the tied parameters {', '.join(group)} are on different devices" for group in self.split_ties
        ]


def _bytes(size: float) -> str:
    return f"{int(size)} bytes" if size < 1000 else f"{readable_size(size)} ({int(size)} bytes)"
