"""Explanations of device maps, as tables with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from torch import nn

from accel_bigmodel.device_maps.budget import DeviceKey
from accel_bigmodel.device_maps.device_usage import Usage, entry_of
from accel_bigmodel.device_maps.greedy import main_devices
from accel_bigmodel.device_maps.model_outline import Outline, is_within
from accel_ckpt.modules.tensors import named_module_tensors
from accel_state.messages import readable_size

_FOLLOWS = "follows the part before"

__all__ = ["DeviceMapExplanation", "PlacedPart", "explanation_of"]


@dataclass(frozen=True)
class PlacedPart:
    """An entry of a device map."""

    module: str
    """Name of the module or tensor; ``""`` is the whole model."""
    size: int
    """Bytes, without parts that have their own entries; a tied parameter counts at its first name."""
    device: DeviceKey
    why: str


@dataclass(frozen=True)
class DeviceMapExplanation:
    """The entries of a device map and the memory they need. ``str()`` of it is a table."""

    parts: Sequence[PlacedPart]
    devices: Sequence[str]
    """A sentence for each device that is used."""
    problems: Sequence[str]
    """Problems of the map under the budgets; empty if there are none."""

    def __str__(self) -> str:
        """The table, in which consecutive parts on one device share a row, then the devices and the problems."""
        rows = [("module", "size", "device", "why"), *_rows(self.parts)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {size:>{widths[1]}}  {device:<{widths[2]}}  {why}".rstrip()
            for name, size, device, why in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        lines += ["", *self.devices]
        if self.problems:
            lines += ["", *(f"PROBLEM: {problem}" for problem in self.problems)]
        return "\n".join(lines)


def _rows(parts: Sequence[PlacedPart]) -> Iterator[tuple[str, str, str, str]]:
    def run_of(numbered: tuple[int, PlacedPart]) -> tuple[object, ...]:
        index, part = numbered
        own = index if part.why != _FOLLOWS else -1
        return own, part.device, part.module.rpartition(".")[0]

    for _, group in groupby(enumerate(parts), run_of):
        run = [part for _, part in group]
        name = run[0].module or "(whole model)"
        if len(run) > 1:
            name += f" … {run[-1].module.rpartition('.')[2]} ({len(run)} parts)"
        yield name, readable_size(sum(part.size for part in run)), str(run[0].device), run[0].why


def explanation_of(
    outline: Outline, device_map: Mapping[str, DeviceKey], budgets: Mapping[DeviceKey, float]
) -> DeviceMapExplanation:
    """Explain a map from the memory that was used and left when each entry was assigned."""
    usage = Usage.of(outline, device_map)
    order: dict[str, int] = {}
    for layer, part in outline.layers():
        inside = (
            [name for name, _ in named_module_tensors(part, recurse=True)]
            if isinstance(part, nn.Module)
            else []
        )
        for name in (layer, *(f"{layer}.{tensor}" for tensor in inside)):
            order.setdefault(entry_of(name, device_map) or "", len(order))
    entries = sorted(device_map, key=lambda entry: order.get(entry, len(order)))
    sizes = dict.fromkeys(device_map, 0)  # without parts that have their own entry
    for tensor, size in outline.tensors():
        entry = entry_of(tensor, device_map)
        if entry is not None:
            sizes[entry] += size
    filled: dict[DeviceKey, int] = {}
    parts: list[PlacedPart] = []
    for name, later in zip(entries, _largest_behind(outline, entries, device_map), strict=True):
        device, size = device_map[name], sizes[name]
        why = _why(outline, parts, _Rooms(budgets, filled, usage.kept, later), name, size, device)
        parts.append(PlacedPart(name, size, device, why))
        filled[device] = filled.get(device, 0) + size
    devices = [
        _summary(device, usage, budgets) for device in {**budgets, **usage.used} if device in usage.used
    ]
    return DeviceMapExplanation(parts, devices, [*_gaps(outline, device_map), *usage.complaints(budgets)])


def _gaps(outline: Outline, device_map: Mapping[str, DeviceKey]) -> Iterator[str]:
    """Tensors of the model that are not in the map, and names in the map that are not in the model."""
    names = {name for name, _ in outline.tensors()}
    names |= {name for name, _ in outline.model.named_modules(remove_duplicate=False)}
    if unknown := [name for name in device_map if name not in names]:
        yield f"the model has no {', '.join(map(repr, unknown))}"
    if forgotten := [name for name, _ in outline.tensors() if entry_of(name, device_map) is None]:
        yield f"the map has no device for {', '.join(forgotten)}"


def _why(
    outline: Outline,
    before: Sequence[PlacedPart],
    rooms: _Rooms,
    name: str,
    size: int,
    device: DeviceKey,
) -> str:
    for partner in outline.partners(name):
        if any(is_within(partner, part.module) for part in before):
            return f"tied to {partner}"
    if before and before[-1].device == device:
        return _FOLLOWS
    if device not in rooms.budgets:
        return "as given"
    passed = takewhile(lambda other: other != device, rooms.budgets)
    full = [text for other in passed if (text := rooms.full(other, size))]
    if not full:
        return "fits"
    whole = outline.kept_whole.get(name)
    return f"does not fit {', '.join(full)}" + (f"; {whole} is not split" if whole else "")


@dataclass(frozen=True)
class _Rooms:
    """What devices had left when a part was assigned."""

    budgets: Mapping[DeviceKey, float]
    filled: Mapping[DeviceKey, int]
    kept: Mapping[DeviceKey, tuple[int, str]]
    """The largest layer that passes through a device under the map."""
    later: tuple[int, str]
    """The largest layer among the later parts, which might have to pass through, as far as was known then."""

    def full(self, device: DeviceKey, size: int) -> str:
        """Why a device has no room for this many bytes; empty if it has."""
        left = self.budgets[device] - self.filled.get(device, 0)
        for kept, layer in ((0, ""), self.kept.get(device, (0, "")), self.later):
            if size > left - kept and (not layer or device in main_devices(self.budgets)):
                room = f"{_bytes(max(left - kept, 0))} left"
                return f"{device} ({room}, {_bytes(kept)} kept for {layer})" if kept else f"{device} ({room})"
        return ""


def _largest_behind(
    outline: Outline, entries: Sequence[str], device_map: Mapping[str, DeviceKey]
) -> list[tuple[int, str]]:
    """For each entry, the bytes and name of the largest layer in the entries after it."""
    own: dict[str, tuple[int, str]] = {}
    for name, _ in outline.layers():
        entry = entry_of(name, device_map)
        if entry is not None:
            own[entry] = max(
                own.get(entry, (0, "")), (outline.sizes.get(name, 0), name), key=lambda layer: layer[0]
            )
    largest, behind = (0, ""), []
    for entry in reversed(entries):
        behind.append(largest)
        largest = max(largest, own.get(entry, (0, "")), key=lambda layer: layer[0])
    return behind[::-1]


def _summary(device: DeviceKey, usage: Usage, budgets: Mapping[DeviceKey, float]) -> str:
    budget = budgets.get(device)
    text = f"device {device}: {_bytes(usage.used[device])}"
    if budget is not None and budget < math.inf:
        text += f" of {_bytes(budget)}"
    kept, layer = usage.kept.get(device, (0, ""))
    return text + (
        f", and {_bytes(kept)} kept for {layer}, the largest layer to pass through it" if kept else ""
    )


def _bytes(size: float) -> str:
    return "unlimited" if size == math.inf else readable_size(size)
