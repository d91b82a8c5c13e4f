"""Which rank computes which matrix: matrices are dealt by their operations, and cut into rounds that bound memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel_ckpt.geometry import Box
from accel_train.muon.newton_schulz import flops

__all__ = ["Matrices", "MuonItem", "MuonPiece", "MuonPlan", "matrices_of", "plan_of"]

_BYTES = 2  # of bfloat16, in which updates are sent and orthogonalised


@dataclass(frozen=True)
class Matrices:
    """How the elements of a parameter form matrices.

    Attributes:
        count: matrices that are stacked along the first dimension; None: the parameter is one.
        rows: of each.
        columns: of each.
        flatten: all dimensions but the first are joined to columns.
    """

    count: int | None
    rows: int
    columns: int
    flatten: bool = False


def matrices_of(shape: Sequence[int], flatten: bool) -> Matrices | None:
    """How a parameter of a shape is read; None if it has no matrices.

    Args:
        shape: of the whole parameter: (rows, columns), or (experts, rows, columns).
        flatten: it is a convolution's, of shape (rows, …).
    """
    if flatten and len(shape) > 2:
        return Matrices(None, shape[0], math.prod(shape[1:]), flatten=True)
    if len(shape) == 2:
        return Matrices(None, shape[0], shape[1])
    return Matrices(shape[0], shape[1], shape[2]) if len(shape) == 3 else None


@dataclass(frozen=True)
class MuonPiece:
    """A box of an item that a rank holds.

    Attributes:
        part: its place among the boxes of the parameter on that rank.
        where: the box in that part.
        within: the box in the item.
        sizes: of the box.
    """

    part: int
    where: tuple[slice, ...]
    within: tuple[slice, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class MuonItem:
    """Matrices of one parameter that one rank orthogonalises together: one, or some of a stack.

    Attributes:
        parameter: its place among the parameters of the plan.
        sizes: shape of the item's box in the parameter.
        pieces: what each rank holds of it.
        elements: number of elements.
        cost: floating-point operations.
        home: the rank that holds all of it; None: several ranks hold pieces.
    """

    parameter: int
    sizes: tuple[int, ...]
    pieces: tuple[tuple[MuonPiece, ...], ...]
    elements: int
    cost: int
    home: int | None


Dealt = tuple[tuple[tuple[MuonItem, ...], ...], ...]
"""The items of a round, by copy and by the rank that computes them."""


@dataclass(frozen=True)
class MuonPlan:
    """The rounds of a step; the same on all ranks that hold the parameters.

    Attributes:
        rounds: what is dealt in each.
    """

    rounds: tuple[Dealt, ...]

    def is_exchanged(self, number: int, copy: int) -> bool:
        """Whether ranks of a copy send each other pieces in a round."""
        owners = self.rounds[number][copy]
        return any(item.home is None for owned in owners for item in owned)


def plan_of(
    matrices: Sequence[Matrices],
    shapes: Sequence[Sequence[int]],
    boxes: Sequence[Sequence[Sequence[Box]]],
    copies: int,
    steps: Sequence[int],
    largest: int,
) -> MuonPlan:
    """Deal the matrices of parameters to ranks: the most expensive first, each to the rank with the least so far.

    Args:
        matrices: how each parameter is read.
        shapes: of the parameters.
        boxes: of each rank that the parameters are divided among, for each parameter, those that it holds.
        copies: how many times each box is held by ranks that can share the work.
        steps: of the iteration, for each parameter.
        largest: bytes of whole matrices that a rank holds in one round; a matrix may be larger.
    """
    owners = len(boxes)
    items = [
        item
        for place, (one, shape) in enumerate(zip(matrices, shapes, strict=True))
        for item in _items(
            place, one, tuple(shape), [held[place] for held in boxes], copies, steps[place], largest
        )
        if item.elements
    ]
    load = [[0] * owners for _ in range(copies)]
    dealt: list[list[list[MuonItem]]] = [[[] for _ in range(owners)] for _ in range(copies)]
    for item in sorted(items, key=lambda item: -item.cost):  # stable, so all ranks agree
        places = [
            (load[copy][owner], copy, owner)
            for copy in range(copies)
            for owner in (range(owners) if item.home is None else [item.home])
        ]
        _, copy, owner = min(places)
        load[copy][owner] += item.cost
        dealt[copy][owner].append(item)
    cut = [[_rounds(owned, largest) for owned in copy] for copy in dealt]
    count = max((len(rounds) for copy in cut for rounds in copy), default=0)
    return MuonPlan(
        tuple(
            tuple(tuple(rounds[number] if number < len(rounds) else () for rounds in copy) for copy in cut)
            for number in range(count)
        )
    )


def _items(
    place: int,
    matrices: Matrices,
    shape: tuple[int, ...],
    held: Sequence[Sequence[Box]],
    copies: int,
    steps: int,
    largest: int,
) -> Iterable[MuonItem]:
    cost = flops(matrices.rows, matrices.columns, steps)
    if matrices.count is None:
        yield _item(place, Box((0,) * len(shape), shape), held, cost)
        return
    inner = shape[1:]
    room = max(1, largest // (_BYTES * max(1, math.prod(inner))))
    for start, stop, holders in _ranges(matrices.count, inner, held):
        share = -(-(stop - start) // (copies * holders))
        step = max(1, min(room, share))
        for first in range(start, stop, step):
            count = min(step, stop - first)
            box = Box((first, *(0 for _ in inner)), (count, *inner))
            yield _item(place, box, held, count * cost)


def _ranges(count: int, inner: tuple[int, ...], held: Sequence[Sequence[Box]]) -> list[tuple[int, int, int]]:
    """Ranges of a stack, and how many ranks can compute each: one where ranks hold whole matrices, else all."""
    boxes = [box for rank in held for box in rank if box.volume]
    if all(box.sizes[1:] == inner for box in boxes):
        return sorted((box.offsets[0], box.ends[0], 1) for box in boxes)
    return [(0, count, len(held))]


def _item(place: int, box: Box, held: Sequence[Sequence[Box]], cost: int) -> MuonItem:
    pieces = tuple(tuple(_pieces(box, rank)) for rank in held)
    homes = [rank for rank, its in enumerate(pieces) if any(piece.sizes == box.sizes for piece in its)]
    return MuonItem(place, box.sizes, pieces, box.volume, cost, homes[0] if homes else None)


def _pieces(item: Box, boxes: Sequence[Box]) -> Iterable[MuonPiece]:
    for part, box in enumerate(boxes):
        common = box.meet(item)
        if common is not None:
            where, within = common.within(box.offsets), common.within(item.offsets)
            yield MuonPiece(part, where.slices, within.slices, common.sizes)


def _rounds(owned: Sequence[MuonItem], largest: int) -> list[tuple[MuonItem, ...]]:
    rounds: list[tuple[MuonItem, ...]] = []
    current: list[MuonItem] = []
    size = 0
    for item in owned:
        if current and size + _BYTES * item.elements > largest:
            rounds.append(tuple(current))
            current, size = [], 0
        current.append(item)
        size += _BYTES * item.elements
    return [*rounds, tuple(current)] if current else rounds
