"""Deciding which rank writes which part of divided tensors.

Where a rule says how the ranks of a mesh divide a tensor, each rank computes alone what it writes, in time that does
not grow with the world. Parts that no rule describes are listed by every rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from accel_ckpt.divisions import Division, RankMesh
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.format.layout import LaidOut
from accel_ckpt.format.state_files import part_file
from accel_ckpt.geometry import Box, first_gap, overlap
from accel_ckpt.parts import Part
from accel_ckpt.saving.plan import divide
from accel_ckpt.tensor_storage import METADATA_KEYS, parse_dtype, same_tensor_id

__all__ = [
    "Holding",
    "PartKey",
    "PartsByStem",
    "Shares",
    "check_cover",
    "describe_parts",
    "divide_parts",
    "files_of",
    "share",
    "tied_parts",
]

K = TypeVar("K", bound=Hashable)

PartsByStem: TypeAlias = Mapping[str, Mapping[str, Sequence[Part]]]
"""File stem → name of the tensor → this rank's parts of it."""


class Holding(NamedTuple):
    """The parts of a tensor that a rank holds; plain data, because it is sent to all ranks."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: str
    """The dtype of the parts; empty where the rank holds nothing."""
    itemsize: int
    boxes: tuple[Box, ...]
    """The boxes of this rank; empty where ``division`` gives them."""
    division: Division | None = None
    """The rule that gives the boxes of all ranks of a mesh."""

    @property
    def is_nothing(self) -> bool:
        """Whether the rank holds nothing of the tensor."""
        return not self.dtype


class PartKey(NamedTuple):
    """The identity of a part of a tensor; equal on all ranks that hold it."""

    stem: str
    name: str
    box: Box


class Shares(NamedTuple):
    """What a rank writes, and what all have agreed on."""

    names: Mapping[str, frozenset[str]]
    """By file stem, tensors of which this rank writes all its boxes."""
    keys: list[frozenset[PartKey]]
    """The further boxes that each rank writes, of tensors that no rule describes; empty if there are none."""
    aliases: dict[str, dict[str, str]]
    """By file stem, names that are not written because they repeat others."""
    tensors: dict[str, dict[str, LaidOut]]
    """By file stem, the tensors that rules describe."""
    others: dict[str, list[str]]
    """By file stem, the files of all ranks that hold tensors that no rule describes."""

    def keys_of(self, rank: int) -> frozenset[PartKey]:
        """The further boxes that a rank writes."""
        return self.keys[rank] if self.keys else frozenset()


def describe_parts(
    parts: PartsByStem, divisions: Mapping[str, Mapping[str, Division]] | None = None
) -> dict[str, dict[str, Holding]]:
    """Describe this rank's parts for the other ranks.

    Args:
        parts: of this rank.
        divisions: by file stem and name, the rules that are known.
    """
    rules = divisions or {}
    return {
        stem: {name: _held(found, rules.get(stem, {}).get(name)) for name, found in named.items()}
        for stem, named in parts.items()
    }


def _held(parts: Sequence[Part], division: Division | None) -> Holding:
    if division is not None:
        dtype = parts[0].tensor.dtype
        return Holding(parts[0].shape, str(dtype), dtype.itemsize, (), division)
    filled = [part for part in parts if not part.is_empty]
    if not filled:
        return Holding(parts[0].shape, "", 0, ())
    dtype = filled[0].tensor.dtype
    return Holding(parts[0].shape, str(dtype), dtype.itemsize, tuple(part.box for part in filled))


def tied_parts(named: Mapping[str, Sequence[Part]]) -> dict[str, str]:
    """Names whose parts are the same memory as those of an earlier name, to that name."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, parts in named.items():
        keys = [
            (*same_tensor_id(part.tensor), part.offsets, part.shape) for part in parts if not part.is_empty
        ]
        originals = {first.setdefault(key, name) for key in keys}
        if len(originals) == 1 and name not in originals and name not in METADATA_KEYS:
            tied[name] = originals.pop()
    return tied


class _Group(NamedTuple):
    """Ranks that offer the same."""

    parts: Mapping[str, Mapping[str, Holding]]
    tied: Mapping[str, Mapping[str, str]]
    ranks: Sequence[int]


def divide_parts(offers: Sequence[Mapping[str, Any]], rank: int, loads: list[int]) -> Shares:
    """Give each part to one of the ranks that hold it. All ranks decide alike.

    Args:
        offers: of each rank, its parts (``describe_parts``) and its ties (``tied_parts``) by file stem. Ranks that
            offer the same should have one object.
        rank: this rank.
        loads: bytes that each rank writes besides; what no rule describes is added.

    Raises:
        UnsupportedValueError: a tensor is not covered, or covered twice, or ranks disagree about it.
    """
    groups = _groups(offers)
    copies = _Copies()
    aliases: dict[str, dict[str, str]] = {}
    names: dict[str, frozenset[str]] = {}
    tensors: dict[str, dict[str, LaidOut]] = {}
    sizes: dict[int, dict[PartKey, int]] = {}
    for stem in sorted({stem for group in groups for stem in group.parts}):
        by_name: dict[str, list[tuple[_Group, Holding]]] = {}
        for group in groups:
            for name, found in group.parts.get(stem, {}).items():
                by_name.setdefault(name, []).append((group, found))
        aliases[stem] = _agreed_ties(stem, by_name)
        laid_out = tensors[stem] = {}
        mine = []
        for name in sorted(by_name.keys() - aliases[stem].keys()):
            divisions = _rules(name, by_name[name], copies.missing)
            if not divisions:
                _list_boxes(stem, name, by_name[name], sizes)
                continue
            found = next(held for _, held in by_name[name] if not held.is_nothing)
            division, copy = copies.choose(divisions, math.prod(found.shape) * found.itemsize)
            laid_out[name] = LaidOut(found.shape, parse_dtype(found.dtype), division, copy)
            here = copies.place(division.mesh, rank)
            if here is not None and division.copy_of(here) == copy:
                mine.append(name)
        names[stem] = frozenset(mine)
    shares = share([sizes.get(position, {}) for position in range(len(offers))], loads) if sizes else []
    others = {
        stem: [
            part_file(stem, position, number)
            for position, keys in enumerate(shares)
            for number in range(files_of(keys, stem))
        ]
        for stem in tensors
    }
    return Shares(names, shares, aliases, tensors, others)


def _groups(offers: Sequence[Mapping[str, Any]]) -> list[_Group]:
    ranks: dict[int, list[int]] = {}
    for position, offer in enumerate(offers):
        ranks.setdefault(id(offer), []).append(position)
    return [_Group(offers[own[0]]["parts"], offers[own[0]]["tied"], own) for own in ranks.values()]


def _agreed_ties(stem: str, by_name: Mapping[str, Sequence[tuple[_Group, Holding]]]) -> dict[str, str]:
    """Names that every rank that holds a part of them finds to repeat the same other name."""
    agreed = {}
    for name, holders in by_name.items():
        originals = {group.tied.get(stem, {}).get(name) for group, found in holders if not found.is_nothing}
        original = originals.pop() if len(originals) == 1 else None
        if original is not None:
            agreed[name] = original
    return agreed


def _rules(
    name: str,
    holders: Sequence[tuple[_Group, Holding]],
    missing_ranks: Callable[[RankMesh, Sequence[_Group]], list[int]],
) -> list[Division]:
    """The rules by which meshes divide a tensor, alike and each completely; none if some part follows no rule.

    Raises:
        UnsupportedValueError: a rank of a mesh passes nothing of the tensor.
    """
    filled = [(group, found) for group, found in holders if not found.is_nothing]
    alike = {found.shape for _, found in holders}
    kinds = {
        (
            found.dtype,
            found.division.splits,
            found.division.mesh.shape,
            found.division.reading,
            found.division.flat,
        )
        if found.division is not None
        else None
        for _, found in filled
    }
    if len(alike) > 1 or len(kinds) != 1 or None in kinds:
        return []
    offered: dict[Division, list[_Group]] = {}
    for group, found in filled:
        assert found.division is not None, "of one kind"
        offered.setdefault(found.division, []).append(group)
    for division, own in offered.items():
        missing = missing_ranks(division.mesh, own)
        if missing:
            raise UnsupportedValueError(
                f"rank {missing[0]} passes nothing of the tensor {name!r}, which a mesh of "
                f"{math.prod(division.mesh.shape)} ranks divides, rank {own[0].ranks[0]} among them; pass it on all"
            )
    return sorted(offered, key=lambda division: division.mesh)


class _Copies:
    """Chooses which copies of boxes are written, so that ranks write about as much as each other.

    It looks through each mesh once, whatever the number of tensors is.
    """

    def __init__(self) -> None:
        self._missing: dict[tuple[Any, ...], list[int]] = {}
        self._loads: dict[tuple[Division, ...], list[tuple[int, int]]] = {}
        self._places: dict[tuple[RankMesh, int], tuple[int, ...] | None] = {}

    def choose(self, divisions: Sequence[Division], nbytes: int) -> tuple[Division, int]:
        """The division and the copy of it that have least to write so far; the bytes are counted."""
        counts = [division.copies for division in divisions]
        if sum(counts) == 1:
            return divisions[0], 0
        # Tensors that are divided alike compete for the same ranks, whatever their own dimensions are.
        key = tuple(
            division._replace(splits=tuple(s and (0, 1) for s in division.splits), flat=None)
            for division in divisions
        )
        heap = self._loads.setdefault(key, [(0, copy) for copy in range(sum(counts))])
        load, chosen = heap[0]
        heapq.heapreplace(heap, (load + nbytes, chosen))
        for division, count in zip(divisions, counts, strict=True):
            if chosen < count:
                return division, chosen
            chosen -= count
        raise AssertionError("one of the copies is chosen")

    def missing(self, mesh: RankMesh, groups: Sequence[_Group]) -> list[int]:
        """The ranks of a mesh that are in none of some groups, in its order."""
        key = (mesh, *(id(group.parts) for group in groups))
        if key not in self._missing:
            there = {rank for group in groups for rank in group.ranks}
            self._missing[key] = [member for member in mesh.members if member not in there]
        return self._missing[key]

    def place(self, mesh: RankMesh, rank: int) -> tuple[int, ...] | None:
        """The position of a rank in a mesh."""
        if (mesh, rank) not in self._places:
            self._places[mesh, rank] = mesh.coordinate(rank)
        return self._places[mesh, rank]


def _list_boxes(
    stem: str, name: str, holders: Sequence[tuple[_Group, Holding]], sizes: dict[int, dict[PartKey, int]]
) -> None:
    """Add the boxes of a tensor that each rank holds, with their bytes.

    Raises:
        UnsupportedValueError: see `check_cover`.
    """
    listed = [(rank, _with_boxes(found, rank)) for group, found in holders for rank in group.ranks]
    check_cover(name, listed)
    for rank, found in listed:
        for box in found.boxes:
            sizes.setdefault(rank, {})[PartKey(stem, name, box)] = box.volume * found.itemsize


def _with_boxes(found: Holding, rank: int) -> Holding:
    """What a rank holds, box by box."""
    if found.division is None:
        return found
    place = found.division.mesh.coordinate(rank)
    boxes = () if place is None else found.division.boxes(found.shape, place)
    return found._replace(boxes=boxes, dtype=found.dtype if boxes else "", division=None)


def check_cover(name: str, holders: Sequence[tuple[int, Holding]]) -> None:
    """Check that the parts of all ranks together make up a whole tensor.

    Raises:
        UnsupportedValueError: names the missing part, or the ranks that disagree.
    """
    for what in ("shape", "dtype"):
        found: dict[Any, int] = {}
        for position, held in holders:
            if (value := getattr(held, what)) or what == "shape":
                found.setdefault(value, position)
        if len(found) > 1:
            listing = ", ".join(f"{_show(value)} on rank {position}" for value, position in found.items())
            raise UnsupportedValueError(
                f"ranks hold parts of {name!r} as tensors of another {what}: {listing}"
            )
    shape = holders[0][1].shape
    boxes = {box: position for position, h in holders for box in h.boxes}
    if overlap(boxes):
        first, second = next(pair for pair in itertools.combinations(boxes, 2) if overlap(pair))
        raise UnsupportedValueError(
            f"of the tensor {name!r} of shape {list(shape)}, rank {boxes[first]} holds {_range(first)} and rank "
            f"{boxes[second]} {_range(second)}, which overlap without being the same. Replicas hold equal boxes"
        )
    volume = sum(box.volume for box in boxes)
    if volume != Box(shape, shape).volume or not boxes:
        gap = first_gap(shape, boxes) or Box((0,) * len(shape), shape)
        raise UnsupportedValueError(
            f"no rank holds {_range(gap)} of the tensor {name!r} of shape {list(shape)}; pass a Part of every box to "
            "the save, on the rank that holds it"
        )


def _show(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _range(box: Box) -> str:
    """A box as one indexes it."""
    return f"[{', '.join(f'{low}:{high}' for low, high in zip(box.offsets, box.ends, strict=True))}]"


def share(held: Sequence[Mapping[K, int]], loads: list[int]) -> list[frozenset[K]]:
    """Give each thing to one of the ranks that hold it, and count it among their loads.

    Args:
        held: of each rank, what it holds and its bytes.
        loads: bytes that each rank writes besides; changed.
    """
    holders: dict[K, list[int]] = {}
    for position, own in enumerate(held):
        for key in own:
            holders.setdefault(key, []).append(position)
    groups: dict[tuple[int, ...], dict[K, int]] = {}
    for key, positions in holders.items():
        groups.setdefault(tuple(positions), {})[key] = held[positions[0]][key]
    shares: list[set[K]] = [set() for _ in held]
    for group in sorted(groups):
        sizes = groups[group]
        divided = divide(sizes, [loads[position] for position in group])
        for position, keys in zip(group, divided, strict=True):
            shares[position] |= keys
            loads[position] += sum(sizes[key] for key in keys)
    return [frozenset(own) for own in shares]


def files_of(keys: Iterable[PartKey], stem: str) -> int:
    """Number of files of a stem that a rank needs for its parts: the most parts that it writes of one tensor."""
    counts: dict[str, int] = {}
    for key in keys:
        if key.stem == stem:
            counts[key.name] = counts.get(key.name, 0) + 1
    return max(counts.values(), default=0)
