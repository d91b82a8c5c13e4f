"""Greedy assignment: parts in order, each to the first device that still has room, as Accelerate does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch import nn

from accel_bigmodel.device_maps.budget import HOST_PLACES, DeviceKey
from accel_bigmodel.device_maps.model_outline import Named, Outline, Part, class_names, home_of, is_within
from accel_ckpt.saving.plan import convert_file_size_to_int

__all__ = ["Assignment", "assign_greedily", "fallback_allocate", "main_devices"]


@dataclass
class Assignment:
    """Parts with their devices, in order of assignment."""

    device_map: dict[str, DeviceKey] = field(default_factory=dict)
    too_small: dict[DeviceKey, int] = field(default_factory=dict)
    """Devices that got nothing, with the bytes they would have needed for the next part."""
    complete: bool = True
    """Whether every part got a device."""


def main_devices(budgets: Iterable[DeviceKey]) -> list[DeviceKey]:
    """Devices that keep room for the largest layer that passes through them: the one that computes with offloaded
    weights, and the host for weights on disk.
    """
    accelerators = [device for device in budgets if device not in HOST_PLACES]
    if "mps" in accelerators:
        return ["mps"]
    return [*accelerators[:1], "cpu"]


def assign_greedily(
    outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool = False
) -> Assignment:
    """Fill device after device with the parts in order.

    A part that does not fit is split if allowed, otherwise the next device follows. Devices of ``main_devices`` keep
    room for the largest layer that is not assigned yet. A part is assigned together with the parts tied to it.

    Args:
        outline: the model.
        budgets: bytes by device, in order of preference.
        fallback: before leaving a device that got nothing, assign it any later part that fits.
    """
    return _Greedy(outline, budgets, fallback).run()


class _Greedy:
    def __init__(self, outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool) -> None:
        self.outline = outline
        self.budgets = budgets
        self.devices = deque(budgets)
        self.main = main_devices(budgets)
        self.used: dict[DeviceKey, float] = dict.fromkeys(budgets, 0)
        self.queue = OrderedDict(outline.roots())
        """The parts that are not assigned yet."""
        self.largest_below: dict[str, int] = {}
        """Bytes of the largest layer of a part, computed on first use."""
        self.modules: list[tuple[int, str]] = []
        """A heap of the modules of the queue, the one with the largest layer on top; may contain assigned ones."""
        self._add_modules(self.queue)
        # Tensors beside the modules count until such a layer is assigned. They come before or after the modules.
        self.with_largest = max(reversed(self.queue), key=self._largest_below, default="")
        """A part with the largest of the layers; empty if it has to be found again."""
        self.largest = self._largest_below(self.with_largest) if self.queue else 0
        """The bytes of that layer."""
        self.fallback = fallback
        self.falling_back = False
        self.result = Assignment()

    def run(self) -> Assignment:
        while self.queue:
            if not self.devices:
                self.result.complete = False
                break
            self._treat(*self.queue.popitem(last=False))
        return self.result

    def _treat(self, name: str, part: Part) -> None:
        if self.with_largest in (name, ""):
            self._find_largest()
        device = self.devices[0]
        size = self.outline.sizes.get(name, 0)
        tied = _homes_of_partners(self.outline, name, self.queue)
        total = _with_ties(self.outline, name, tied)
        kept = self.largest if device in self.main else 0
        room = self.budgets[device] - kept - self.used[device]
        if total <= room:
            self._assign([name, *tied], total)
        elif tied and size <= room and self._split_one(tied):
            self._put_first([(name, part)])
            self._find_largest()
        elif size >= room and self.outline.can_split(part):
            self._put_first(self.outline.split(name, part))
            self._find_largest()
        elif not self._fall_back(name, part, total):
            if self.used[device] == 0:
                self.result.too_small[device] = total + kept
            self.devices.popleft()
            self.falling_back = False
            self._put_first([(name, part)])

    def _put_first(self, parts: Sequence[Named]) -> None:
        for name, part in reversed(parts):
            self.queue[name] = part
            self.queue.move_to_end(name, last=False)
        self._add_modules(name for name, _ in parts)

    def _add_modules(self, names: Iterable[str]) -> None:
        for name in names:
            if isinstance(self.queue[name], nn.Module):
                heappush(self.modules, (-self._largest_below(name), name))

    def _find_largest(self) -> None:
        while self.modules and self.modules[0][1] not in self.queue:
            heappop(self.modules)
        size, self.with_largest = self.modules[0] if self.modules else (0, "")
        self.largest = -size

    def _largest_below(self, name: str) -> int:
        if name not in self.largest_below:
            self.largest_below[name], _ = self.outline.largest([(name, self.queue[name])])
        return self.largest_below[name]

    def _assign(self, names: Sequence[str], size: int) -> None:
        device = self.devices[0]
        self.falling_back = False
        self.used[device] += size
        self.result.device_map.update(dict.fromkeys(names, device))
        for name in names[1:]:
            del self.queue[name]

    def _split_one(self, tied: Sequence[str]) -> bool:
        """Split the first of the tied parts that may be split, at its position in the queue."""
        chosen = next((name for name in tied if self.outline.can_split(self.queue[name])), None)
        if chosen is None:
            return False
        parts: list[Named] = []
        for name, part in self.queue.items():
            parts += self.outline.split(name, part) if name == chosen else [(name, part)]
        self.queue = OrderedDict(parts)
        self._add_modules(name for name in self.queue if is_within(name, chosen))
        return True

    def _fall_back(self, name: str, part: Part, total: int) -> bool:
        device = self.devices[0]
        # Once between two assignments: a part that is found but does not fit would be found forever.
        if not self.fallback or self.falling_back or self.used[device] > 0 or device == "disk":
            return False
        self.falling_back = True
        found, its_part, rest = _find_that_fits(
            self.queue, self.outline, self.budgets[device] - max(self.largest, total)
        )
        if found is None or its_part is None:
            return False
        divided = home_of(found, self.queue)
        assert divided is not None, "the part that was found is inside a part of the queue"
        self.queue = OrderedDict([(found, its_part), (name, part), *rest])
        pieces = [
            piece
            for piece in self.queue
            if is_within(piece, divided) and isinstance(self.queue[piece], nn.Module)
        ]
        self._add_modules([name, *pieces])
        if divided == self.with_largest:
            self.with_largest = next(
                (piece for piece in pieces if self._largest_below(piece) == self.largest), ""
            )
        return True


def _homes_of_partners(outline: Outline, name: str, parts: Collection[str]) -> list[str]:
    """The parts that contain tensors tied to those of a part."""
    homes = (home_of(partner, parts) for partner in outline.partners(name))
    return [home for home in dict.fromkeys(homes) if home is not None]


def _with_ties(outline: Outline, name: str, tied: Iterable[str]) -> int:
    # A tied parameter counts only in the first part of the model that contains it.
    return outline.sizes.get(name, 0) + sum(outline.sizes.get(other, 0) for other in tied)


def fallback_allocate(
    modules: Sequence[Named],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Part | None, list[Named]]:
    """Find the first part that fits a limit, searching inside parts that do not.

    Args:
        modules: names and parts to search, in order.
        module_sizes: bytes by name.
        size_limit: bytes, or text such as ``"1GB"``; nothing fits a negative limit.
        no_split_module_classes: classes whose modules are not searched inside.
        tied_parameters: groups of names of one parameter; tied parts count together.

    Returns:
        The name, the part, and the remaining parts, where modules that contained it are replaced by their children.
        None, None and all modules, if nothing fits.
    """
    try:
        limit = convert_file_size_to_int(size_limit)
    except ValueError:
        return None, None, list(modules)
    outline = Outline(nn.Module(), module_sizes, tied_parameters or (), class_names(no_split_module_classes))
    return _find_that_fits(dict(modules), outline, limit)


def _find_that_fits(
    modules: Mapping[str, Part], outline: Outline, limit: float
) -> tuple[str | None, Part | None, list[Named]]:
    rest = deque(modules.items())
    known = set(modules)
    while rest:
        name, part = rest.popleft()
        if _with_ties(outline, name, _homes_of_partners(outline, name, known)) <= limit:
            return name, part, _without(modules, name, outline)
        children = outline.split(name, part)
        rest.extendleft(reversed(children))
        known.update(child for child, _ in children)
    return None, None, list(modules.items())


def _without(modules: Mapping[str, Part], name: str, outline: Outline) -> list[Named]:
    """The modules without one part; modules that contained it are split."""
    remaining: list[Named] = []
    rest = deque(modules.items())
    while rest:
        other, part = rest.popleft()
        if other == name:
            continue
        if is_within(name, other):
            rest.extendleft(reversed(outline.split(other, part)))
        else:
            remaining.append((other, part))
    return remaining
