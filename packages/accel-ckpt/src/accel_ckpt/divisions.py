"""Divisions of tensors among the ranks of a mesh: rules from which each rank computes what any other holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.geometry import Box, flat_boxes

__all__ = ["Division", "RankMesh", "Splits", "held_boxes", "reading_of", "readings", "splits_of"]

Splits: TypeAlias = tuple[tuple[int, int] | None, ...]
"""For each dimension of a mesh: the dimension of the tensor that it divides, and the number of pieces of a strided
shard, which are divided one by one, else 1. ``None``: its ranks hold copies."""

Coordinate: TypeAlias = tuple[int, ...]
"""A position in a mesh: an index for each dimension."""

_Run: TypeAlias = tuple[int, int]
"""A range of indices: the first, and one past the last."""


class RankMesh(NamedTuple):
    """The ranks of a mesh by their position in it."""

    shape: tuple[int, ...]
    first: int
    """The rank at the beginning."""
    strides: tuple[int, ...]
    """Ranks from one index to the next, for each dimension; of no use where ``ranks`` lists them."""
    ranks: tuple[int, ...] = ()
    """The ranks in the order of their positions, where strides do not give them."""

    @classmethod
    def of(cls, ranks: torch.Tensor) -> RankMesh:
        """The mesh of ranks that a ``DeviceMesh`` has."""
        shape = tuple(ranks.shape)
        flat: list[int] = ranks.reshape(-1).tolist()
        inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        strides = tuple(flat[step] - flat[0] if n > 1 else 0 for n, step in zip(shape, inner, strict=True))
        grid = torch.full(shape, flat[0], dtype=torch.int64, device="cpu")
        for dim, (count, stride) in enumerate(zip(shape, strides, strict=True)):
            steps = torch.arange(count, device="cpu") * stride
            grid += steps.view([count if d == dim else 1 for d in range(len(shape))])
        mesh = cls(shape, flat[0], strides)
        if mesh.is_nested and torch.equal(grid, ranks.to("cpu", torch.int64)):
            return mesh
        return cls(shape, flat[0], (0,) * len(shape), tuple(flat))

    @property
    def is_nested(self) -> bool:
        """Whether each step of a dimension goes past all that dimensions of smaller steps reach."""
        reach = 0
        for stride, count in sorted(zip(self.strides, self.shape, strict=True)):
            if count > 1 and stride <= reach:
                return False
            reach += stride * (count - 1)
        return True

    @property
    def members(self) -> Iterator[int]:
        """The ranks in the order of their positions."""
        if self.ranks:
            return iter(self.ranks)
        return (self.rank(position) for position in itertools.product(*map(range, self.shape)))

    @property
    def last(self) -> int:
        """The highest rank."""
        if self.ranks:
            return max(self.ranks)
        return self.first + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a position."""
        if self.ranks:
            at = 0
            for index, count in zip(coordinate, self.shape, strict=True):
                at = at * count + index
            return self.ranks[at]
        return self.first + sum(
            index * stride for index, stride in zip(coordinate, self.strides, strict=True)
        )

    def coordinate(self, rank: int) -> Coordinate | None:
        """The position of a rank; ``None`` if it is not in the mesh."""
        if self.ranks:
            if rank not in self.ranks:
                return None
            at, found = self.ranks.index(rank), []
            for count in reversed(self.shape):
                at, index = divmod(at, count)
                found.append(index)
            return tuple(reversed(found))
        rest, position = rank - self.first, [0] * len(self.shape)
        for dim in sorted(range(len(self.shape)), key=self.strides.__getitem__, reverse=True):
            if self.shape[dim] > 1 and rest > 0:
                position[dim] = min(rest // self.strides[dim], self.shape[dim] - 1)
                rest -= position[dim] * self.strides[dim]
        return None if rest else tuple(position)


class Division(NamedTuple):
    """How the ranks of a mesh divide a tensor; equal on all of them."""

    mesh: RankMesh
    splits: Splits
    reading: int = 0
    """The order in which splits of one dimension were made; see `readings`."""
    flat: tuple[int, int] | None = None
    """Where the flattened elements are divided, by the only dimension of the mesh: the number that each rank has of a
    longer flat tensor, and where the elements of this one begin in it. Splits then say nothing."""

    @property
    def copies(self) -> int:
        """The number of ranks that hold each box."""
        return math.prod([n for n, split in zip(self.mesh.shape, self.splits, strict=True) if split is None])

    def copy_of(self, coordinate: Coordinate) -> int:
        """Which of the copies the rank at a position has."""
        at = 0
        for index, count, split in zip(coordinate, self.mesh.shape, self.splits, strict=True):
            if split is None:
                at = at * count + index
        return at

    def rank_of(self, coordinate: Coordinate, copy: int) -> int:
        """The rank that has one of the copies of what is at a position."""
        position = list(coordinate)
        for dim in reversed(range(len(position))):
            if self.splits[dim] is None:
                copy, position[dim] = divmod(copy, self.mesh.shape[dim])
        return self.mesh.rank(tuple(position))

    def boxes(self, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[Box, ...]:
        """The boxes of a tensor that the rank at a position holds."""
        if self.flat is not None:
            size, begin = self.flat
            start = max(0, coordinate[0] * size - begin)
            stop = min(math.prod(shape), (coordinate[0] + 1) * size - begin)
            return tuple(flat_boxes(start, stop, shape))
        return tuple(
            Box(offsets, tuple(part.stop - part.start for part in where))
            for where, offsets in held_boxes(shape, self.splits, self.mesh.shape, coordinate, self.reading)
        )

    def holders(self, shape: tuple[int, ...], box: Box) -> Iterator[Coordinate]:
        """The positions, at index 0 among copies, that hold some of a box."""
        if self.flat is not None:
            size, begin = self.flat
            steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            first = begin + sum(at * step for at, step in zip(box.offsets, steps, strict=True))
            last = begin + sum((end - 1) * step for end, step in zip(box.ends, steps, strict=True))
            indices = range(first // size, min(last // size + 1, self.mesh.shape[0]))
            return ((index,) for index in indices if any(b.meet(box) for b in self.boxes(shape, (index,))))
        order = readings(self.splits, self.mesh.shape)[self.reading]
        runs = [[(0, size)] for size in shape]
        return _holders(order, runs, box, (0,) * len(self.mesh.shape))


def splits_of(shape: Sequence[int], placements: Sequence[Any]) -> Splits:
    """The splits that placements of a ``DTensor`` give.

    Raises:
        UnsupportedValueError: a placement does not give boxes.
    """
    found: list[tuple[int, int] | None] = []
    for placement in placements:
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            found.append((placement.dim % max(1, len(shape)), int(getattr(placement, "split_factor", 1))))
        elif kind == "Replicate":
            found.append(None)
        else:
            raise UnsupportedValueError(
                f"a DTensor of shape {list(shape)} has the placement {placement}, of which this rank's "
                "values are no box of the tensor; redistribute() it to Shard or Replicate first"
            )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Split:
    """The division of a dimension of a tensor by a dimension of a mesh."""

    dim: int
    count: int
    mesh_dim: int
    factor: int
    """The number of pieces of a strided shard, which are divided one by one; else 1."""


def readings(splits: Splits, mesh: Sequence[int]) -> list[list[_Split]]:
    """The orders in which splits may have been made, the likeliest first.

    Where FSDP divides what TP has left of a dimension, the placements name FSDP first, as a strided shard in the number
    of pieces that TP makes: TP was first. The two readings differ only where sizes are not divisible; then the local
    shape decides.
    """
    order = [
        _Split(split[0], count, mesh_dim, split[1])
        for mesh_dim, (split, count) in enumerate(zip(splits, mesh, strict=True))
        if split is not None
    ]
    strided = [split for split in order if split.factor > 1]
    if strided and all(
        split.factor == math.prod(later.count for later in order[at + 1 :] if later.dim == split.dim)
        for at, split in enumerate(order)
        if split.factor > 1
    ):
        plain = [split for split in order if split.factor == 1]
        once = [_Split(split.dim, split.count, split.mesh_dim, 1) for split in reversed(strided)]
        return [[*plain, *once], order]
    return [order]


@lru_cache(maxsize=4096)
def reading_of(
    shape: tuple[int, ...],
    splits: Splits,
    mesh: tuple[int, ...],
    coordinate: Coordinate,
    local: tuple[int, ...],
) -> int:
    """The reading that gives a rank at a position a part of this shape.

    Raises:
        UnsupportedValueError: none does.
    """
    for reading in range(len(readings(splits, mesh))):
        runs = _runs(shape, splits, mesh, coordinate, reading)
        if tuple(sum(stop - start for start, stop in run) for run in runs) == local:
            return reading
    raise UnsupportedValueError(
        f"a DTensor of shape {list(shape)} that a mesh {mesh} divides as {splits} holds {list(local)} on this rank, at "
        f"{coordinate}, which is not what its placements give; pass its Part, or full_tensor()"
    )


@lru_cache(maxsize=4096)
def held_boxes(
    shape: tuple[int, ...], splits: Splits, mesh: tuple[int, ...], coordinate: Coordinate, reading: int
) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes of the rank at a position: where each is in the local tensor, and its offsets in the whole one.

    torch gives one offset per rank, also where a strided shard has gaps; so the boxes are computed here. Parameters,
    gradients and states have few different divisions, and a save or a load asks for each several times.
    """
    runs = _runs(shape, splits, mesh, coordinate, reading)
    if 0 not in shape and any(start == stop for run in runs for start, stop in run):
        return []
    cuts = [list(itertools.accumulate((stop - start for start, stop in run), initial=0)) for run in runs]
    found = []
    for chosen in itertools.product(*(range(len(run)) for run in runs)):
        where = tuple(slice(cut[i], cut[i + 1]) for cut, i in zip(cuts, chosen, strict=True))
        found.append((where, tuple(run[i][0] for run, i in zip(runs, chosen, strict=True))))
    return found


def _runs(
    shape: Sequence[int], splits: Splits, mesh: Sequence[int], coordinate: Coordinate, reading: int
) -> list[list[_Run]]:
    """For each dimension the ranges of indices that the rank at a position holds; at least one, which may be empty."""
    runs: list[list[_Run]] = [[(0, size)] for size in shape]
    for split in readings(splits, mesh)[reading]:
        runs[split.dim] = _share(runs[split.dim], split, coordinate[split.mesh_dim])
    return [run or [(0, 0)] for run in runs]


def _holders(
    order: Sequence[_Split], runs: list[list[_Run]], box: Box, position: Coordinate
) -> Iterator[Coordinate]:
    if not order:
        yield position
        return
    split = order[0]
    low, high = box.offsets[split.dim], box.ends[split.dim]
    indices: Iterable[int] = range(split.count)
    if split.factor == 1 and len(runs[split.dim]) == 1:
        [(start, stop)] = runs[split.dim]
        step = -(-(stop - start) // split.count)
        indices = range(max(low - start, 0) // step, -(-(min(high, stop) - start) // step)) if step else ()
    for index in indices:
        share = _share(runs[split.dim], split, index)
        if any(start < high and low < stop for start, stop in share):
            below = [share if dim == split.dim else run for dim, run in enumerate(runs)]
            there = (*position[: split.mesh_dim], index, *position[split.mesh_dim + 1 :])
            yield from _holders(order[1:], below, box, there)


def _share(runs: Sequence[_Run], split: _Split, index: int) -> list[_Run]:
    """What a split leaves of some ranges for one index of its dimension of the mesh."""
    pieces = (_chunk(runs, split.factor, piece) for piece in range(split.factor))
    return _joined(run for piece in pieces for run in _chunk(piece, split.count, index))


def _chunk(runs: Sequence[_Run], count: int, index: int) -> list[_Run]:
    """One of `count` parts of ranges, as ``torch.chunk`` divides: equal sizes, the last ones smaller or empty."""
    if count == 1:
        return list(runs)
    total = sum(stop - start for start, stop in runs)
    step = -(-total // count)
    return _taken(runs, index * step, min(total, (index + 1) * step))


def _taken(runs: Sequence[_Run], begin: int, end: int) -> list[_Run]:
    """The elements ``begin`` to ``end`` of ranges that are counted through."""
    found, at = [], 0
    for start, stop in runs:
        low, high = max(begin - at, 0), min(end - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    found: list[_Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
