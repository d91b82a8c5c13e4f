"""The best map that keeps the order of the layers, for budgets for which greedy assignment fails.

Layers go to devices in order, so a map is a partition of their sequence into intervals. Filling each device as far as
possible is optimal, because a shorter rest is never harder to assign. What the main devices must keep free depends only
on the offloaded layers, so all positions at which offloading may begin are tried, the last one first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from accel_bigmodel.device_maps.budget import HOST_PLACES, DeviceKey
from accel_bigmodel.device_maps.greedy import main_devices
from accel_bigmodel.device_maps.model_outline import Outline

__all__ = ["Unit", "assign_in_order", "units_of"]


@dataclass
class Unit:
    """Layers that must share a device because they have tied tensors; most units are one layer."""

    names: list[str]
    size: int


def assign_in_order(outline: Outline, budgets: Mapping[DeviceKey, float]) -> dict[str, DeviceKey] | None:
    """The map with the fewest offloaded layers that keeps the budgets, or None if there is none.

    Args:
        outline: the model.
        budgets: bytes by device, in order of preference: accelerators, ``"cpu"``, ``"disk"``.
    """
    units = units_of(outline)
    sums = [0, *accumulate(unit.size for unit in units)]
    behind = _largest_behind(outline, units)
    accelerators = [device for device in budgets if device not in HOST_PLACES]
    for cut in range(len(units), -1, -1):
        ends = _fill_accelerators(sums, cut, [budgets[device] for device in accelerators], behind[cut])
        if ends is not None:
            host_end = _fill_host(sums, behind, cut, budgets)
            # If offloading began earlier, the host would have to hold more.
            places = [*accelerators, "cpu", "disk"]
            return None if host_end is None else _as_map(units, places, [*ends, host_end])
    return None


def units_of(outline: Outline) -> list[Unit]:
    """The layers in order; tied layers are one unit at the position of the first."""
    layers = [name for name, _ in outline.layers()]
    home = {name: name for name in layers}  # a layer → the first layer of its unit

    def first(name: str) -> str:
        while home[name] != name:
            name = home[name]
        return name

    position = {name: index for index, name in enumerate(layers)}
    for group in outline.ties:
        heads = sorted({first(_layer_of(name, position)) for name in group}, key=position.__getitem__)
        for other in heads[1:]:
            home[other] = heads[0]
    units: dict[str, Unit] = {}
    for name in layers:
        size = outline.sizes.get(name, 0)
        unit = units.setdefault(first(name), Unit([], 0))
        unit.names.append(name)
        unit.size += size
    return list(units.values())


def _layer_of(tensor: str, layers: Mapping[str, int]) -> str:
    while tensor not in layers:
        tensor = tensor.rpartition(".")[0]
    return tensor


def _largest_behind(outline: Outline, units: Sequence[Unit]) -> list[int]:
    """For each cut, the bytes of the largest group of layers after it that is streamed together."""
    group_of = {name: outline.group_of(name, part) for name, part in outline.layers()}
    groups: dict[str, int] = {}
    behind = [0]
    for unit in reversed(units):
        for name in unit.names:
            group = group_of[name]
            groups[group] = groups.get(group, 0) + outline.sizes.get(name, 0)
        behind.append(max(behind[-1], *(groups[group_of[name]] for name in unit.names)))
    return behind[::-1]


def _fill_accelerators(
    sums: Sequence[int], end: int, budgets: Sequence[float], largest: int
) -> list[int] | None:
    """Where each accelerator's units end when the first ``end`` units fill them in order; None if they do not fit.

    The first accelerator that holds units also computes the offloaded layers, the largest of which has ``largest``
    bytes; devices too small for that are left empty.
    """
    for main in range(len(budgets)) if end else ():
        ends = [0] * main
        for index, budget in enumerate(budgets[main:]):
            room = budget - (largest if index == 0 else 0)
            at = ends[-1] if ends else 0
            ends.append(max(at, min(end, bisect_right(sums, sums[at] + room) - 1)))
            if ends[-1] == 0:
                break
        if ends[-1] == end:
            return ends + [end] * (len(budgets) - len(ends))
    return None if end else [0] * len(budgets)


def _fill_host(
    sums: Sequence[int], behind: Sequence[int], start: int, budgets: Mapping[DeviceKey, float]
) -> int | None:
    """Where the host's units end and those on disk begin; None if they do not fit."""
    total = len(sums) - 1
    reserves = "cpu" in main_devices(budgets)
    for end in range(total, start - 1, -1):
        kept = behind[end] if reserves and end > start else 0
        if (
            sums[end] - sums[start] + kept <= budgets.get("cpu", 0)
            and sums[total] - sums[end] <= budgets["disk"]
        ):
            return end
    return None


def _as_map(units: Sequence[Unit], places: Sequence[DeviceKey], ends: Sequence[int]) -> dict[str, DeviceKey]:
    found: dict[str, DeviceKey] = {}
    for device, (start, end) in zip(places, pairwise([0, *ends, len(units)]), strict=True):
        for unit in units[start:end]:
            found.update(dict.fromkeys(unit.names, device))
    return found
