"""Arithmetic of boxes: ranges of indices, one per dimension of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add, lt, sub
from typing import NamedTuple

__all__ = ["Box", "first_gap", "flat_boxes", "overlap"]


class Box(NamedTuple):
    """A range of indices in each dimension of a tensor."""

    offsets: tuple[int, ...]
    """First index."""
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index of the box, per dimension."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box from the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def within(self, offsets: Sequence[int]) -> Box:
        """Return the box with offsets relative to ``offsets``."""
        return Box(tuple(map(sub, self.offsets, offsets)), self.sizes)

    def meet(self, other: Box) -> Box | None:
        """The elements that two boxes have in common; ``None`` if there are none."""
        if self == other:
            return self if all(self.sizes) else None
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        return Box(low, tuple(map(sub, high, low))) if all(map(lt, low, high)) else None

    def without(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes of the elements that are not in another box."""
        common = self.meet(other)
        if common is None:
            yield self
            return
        low, high = list(self.offsets), list(self.ends)
        for d, (begin, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            for start, stop in ((low[d], begin), (end, high[d])):
                if start < stop:
                    yield _between([*low[:d], start, *low[d + 1 :]], [*high[:d], stop, *high[d + 1 :]])
            low[d], high[d] = begin, end


def _between(low: Sequence[int], high: Sequence[int]) -> Box:
    return Box(tuple(low), tuple(map(sub, high, low)))


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of the boxes have an element in common."""
    filled = [(box.offsets, box.ends) for box in boxes if box.volume]
    if len(filled) < 2:
        return False
    dimensions = range(len(filled[0][0]))
    # Along the dimension with most different offsets, few boxes are open at a time.
    along = max(dimensions, key=lambda d: len({low[d] for low, _ in filled}), default=0)
    beside: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(filled, key=lambda box: box[0][along : along + 1]):
        beside = [other for other in beside if other[1][along] > low[along]] if dimensions else beside
        if any(all(low[d] < b[d] and a[d] < high[d] for d in dimensions) for a, b in beside):
            return True
        beside.append((low, high))
    return False


def first_gap(shape: Sequence[int], boxes: Iterable[Box]) -> Box | None:
    """A box of a tensor that none of the boxes covers; ``None`` if they cover all of it."""
    rest = [Box((0,) * len(shape), tuple(shape))]
    for box in boxes:
        rest = [piece for whole in rest for piece in whole.without(box)]
    return next((piece for piece in rest if piece.volume), None)


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Boxes that make up elements ``start`` to ``stop`` of a flattened (row-major) tensor, in that order.

    At most ``2 * len(shape) - 1`` boxes: a rest of a row, whole rows and a beginning of a row, per dimension.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(first, begin, end, inner)
        return
    if begin:
        yield from _in_row(first, begin, row, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    yield from _in_row(last, 0, end, inner)


def _in_row(row: int, begin: int, end: int, inner: tuple[int, ...]) -> Iterator[Box]:
    for box in flat_boxes(begin, end, inner):
        yield Box((row, *box.offsets), (1, *box.sizes))
