"""Placing parts in order, each on the first device that still has room: what users of Accelerate know."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from accel_bigmodel.budget import HOST_PLACES, DeviceKey
from accel_bigmodel.outline import Named, Outline, Part, class_names, homes_of, is_within
from accel_ckpt.plan import convert_file_size_to_int

__all__ = ["Placement", "fallback_allocate", "main_devices", "place_greedily"]


@dataclass
class Placement:
    """Parts with their devices, in order of placing."""

    device_map: dict[str, DeviceKey] = field(default_factory=dict)
    too_small: dict[DeviceKey, int] = field(default_factory=dict)
    """Devices that got nothing, with the bytes that would have let them take the next part."""
    complete: bool = True
    """Whether everything found a place."""


def main_devices(budgets: Iterable[DeviceKey]) -> list[DeviceKey]:
    """Devices that keep room for the largest layer that has to pass through them: the one that computes for
    offloaded weights, and the host for weights on disk.
    """
    accelerators = [device for device in budgets if device not in HOST_PLACES]
    if "mps" in accelerators:
        return ["mps"]
    return [*accelerators[:1], "cpu"]


def place_greedily(outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool = False) -> Placement:
    """Fill device after device with the parts in order.

    A part that does not fit is split where it may be, else the next device's turn has come. Devices of
    ``main_devices`` keep as much free as the largest layer that is not placed. A part takes along what is tied to it.

    Args:
        outline: the model.
        budgets: bytes by device, in order of preference.
        fallback: before leaving a device that got nothing, place any later part that fits.
    """
    return _Greedy(outline, budgets, fallback).run()


class _Greedy:
    def __init__(self, outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool) -> None:
        self.outline = outline
        self.budgets = budgets
        self.devices = deque(budgets)
        self.main = main_devices(budgets)
        self.used: dict[DeviceKey, float] = dict.fromkeys(budgets, 0)
        self.queue = deque(outline.roots())
        self.largest, names = outline.largest(list(self.queue))
        self.largest_names = set(names)
        self.fallback = fallback
        self.falling_back = False
        self.result = Placement()

    def run(self) -> Placement:
        while self.queue:
            if not self.devices:
                self.result.complete = False
                break
            self._treat(*self.queue.popleft())
        return self.result

    def _treat(self, name: str, part: Part) -> None:
        self._forget_layers_of(name, part)
        device = self.devices[0]
        size = self.outline.sizes.get(name, 0)
        partners = self.outline.partners(name)
        tied = homes_of(partners, self.queue)
        total = _with_ties(self.outline, name, tied)
        kept = self.largest if device in self.main else 0
        room = self.budgets[device] - kept - self.used[device]
        if total <= room:
            self._assign([name, *(other for other, _ in tied)], total)
        elif partners and size <= room and self._split_one(tied):
            self.queue.appendleft((name, part))
            self._find_largest()
        elif size >= room and self.outline.can_split(part):
            self.queue.extendleft(reversed(self.outline.split(name, part)))
            self._find_largest()
        elif not self._fall_back(name, part, total):
            if self.used[device] == 0:
                self.result.too_small[device] = total + kept
            self.devices.popleft()
            self.falling_back = False
            self.queue.appendleft((name, part))

    def _forget_layers_of(self, name: str, part: Part) -> None:
        """Keep ``largest`` the size of the largest layer that is not being treated or placed."""
        if self.outline.can_split(part):
            self.largest_names = {layer for layer in self.largest_names if not is_within(layer, name)}
        else:
            self.largest_names.discard(name)
        if not self.largest_names:
            self._find_largest()

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self.queue if isinstance(part, nn.Module)]
        self.largest, names = self.outline.largest(modules)
        self.largest_names = set(names)

    def _assign(self, names: Sequence[str], size: int) -> None:
        device = self.devices[0]
        self.falling_back = False
        self.used[device] += size
        self.result.device_map.update(dict.fromkeys(names, device))
        if len(names) > 1:
            self.queue = deque(named for named in self.queue if named[0] not in names)

    def _split_one(self, tied: Sequence[Named]) -> bool:
        """Split the first of the tied parts that may be split, where it stands in the queue."""
        for name, part in tied:
            if self.outline.can_split(part):
                place = next(index for index, (other, _) in enumerate(self.queue) if other == name)
                del self.queue[place]
                for child in reversed(self.outline.split(name, part)):
                    self.queue.insert(place, child)
                return True
        return False

    def _fall_back(self, name: str, part: Part, total: int) -> bool:
        device = self.devices[0]
        # Once between two placings: what was found and then did not fit would be found for ever.
        if not self.fallback or self.falling_back or self.used[device] > 0 or device == "disk":
            return False
        self.falling_back = True
        found, its_part, rest = _find_that_fits(
            list(self.queue), self.outline, self.budgets[device] - max(self.largest, total)
        )
        if found is None or its_part is None:
            return False
        self.queue = deque([(found, its_part), (name, part), *rest])
        return True


def _with_ties(outline: Outline, name: str, tied: Iterable[Named]) -> int:
    # A parameter counts in one of the parts only, whichever comes first in the model.
    return outline.sizes.get(name, 0) + sum(outline.sizes.get(other, 0) for other, _ in tied)


def fallback_allocate(
    modules: Sequence[Named],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Part | None, list[Named]]:
    """Find the first part that fits a limit, looking into the parts that do not.

    Args:
        modules: names and parts to search, in order.
        module_sizes: bytes by name.
        size_limit: bytes, or text such as ``"1GB"``; nothing fits a limit that is negative.
        no_split_module_classes: classes that are not looked into.
        tied_parameters: groups of names of one parameter; tied parts count together.

    Returns:
        The name, the part, and what remains: the modules that it was found in are replaced by their parts. None
        twice and all modules, if nothing fits.
    """
    try:
        limit = convert_file_size_to_int(size_limit)
    except ValueError:
        return None, None, list(modules)
    outline = Outline(nn.Module(), module_sizes, tied_parameters or (), class_names(no_split_module_classes))
    return _find_that_fits(list(modules), outline, limit)


def _find_that_fits(
    modules: list[Named], outline: Outline, limit: float
) -> tuple[str | None, Part | None, list[Named]]:
    rest = deque(modules)
    while rest:
        name, part = rest.popleft()
        # A tied part that was passed by, because it is too large, is still among the modules.
        total = _with_ties(outline, name, homes_of(outline.partners(name), [*rest, *modules]))
        if total <= limit:
            return name, part, _without(modules, name, outline)
        rest.extendleft(reversed(outline.split(name, part)))
    return None, None, modules


def _without(modules: list[Named], name: str, outline: Outline) -> list[Named]:
    """The modules less one part, those around it split."""
    remaining: list[Named] = []
    rest = deque(modules)
    while rest:
        other, part = rest.popleft()
        if other == name:
            continue
        if is_within(name, other):
            rest.extendleft(reversed(outline.split(other, part)))
        else:
            remaining.append((other, part))
    return remaining
