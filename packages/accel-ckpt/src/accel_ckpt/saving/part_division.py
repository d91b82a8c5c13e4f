"""Deciding which rank writes which part of divided tensors."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.geometry import Box, first_gap, overlap
from accel_ckpt.parts import Part
from accel_ckpt.saving.plan import divide
from accel_ckpt.tensor_storage import METADATA_KEYS, same_tensor_id

__all__ = [
    "Holding",
    "PartKey",
    "PartsByStem",
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


class PartKey(NamedTuple):
    """The identity of a part of a tensor; equal on all ranks that hold it."""

    stem: str
    name: str
    box: Box


def describe_parts(parts: PartsByStem) -> dict[str, dict[str, Holding]]:
    """Describe this rank's parts for the other ranks."""
    return {stem: {name: _held(found) for name, found in named.items()} for stem, named in parts.items()}


def _held(parts: Sequence[Part]) -> Holding:
    filled = [part for part in parts if not part.is_empty]
    dtype = filled[0].tensor.dtype if filled else None
    return Holding(
        parts[0].shape,
        "" if dtype is None else str(dtype),
        0 if dtype is None else dtype.itemsize,
        tuple(part.box for part in filled),
    )


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


def divide_parts(
    held: Sequence[Mapping[str, Mapping[str, Holding]]],
    tied: Sequence[Mapping[str, Mapping[str, str]]],
    loads: list[int],
) -> tuple[list[frozenset[PartKey]], dict[str, dict[str, str]]]:
    """Give each part to one of the ranks that hold it. The same on all ranks.

    Args:
        held: of each rank, by file stem and name.
        tied: of each rank, by file stem: name → an earlier name that it repeats.
        loads: bytes that each rank writes besides; what it is given is added.

    Returns:
        What each rank writes, and the names that are not written because they repeat others, by file stem.

    Raises:
        UnsupportedValueError: a tensor is not covered, or covered twice, or ranks disagree about it.
    """
    aliases: dict[str, dict[str, str]] = {}
    sizes: list[dict[PartKey, int]] = [{} for _ in held]
    for stem in sorted({stem for own in held for stem in own}):
        by_name: dict[str, list[tuple[int, Holding]]] = {}
        for position, own in enumerate(held):
            for name, found in own.get(stem, {}).items():
                by_name.setdefault(name, []).append((position, found))
        aliases[stem] = _agreed_ties(by_name, [own.get(stem, {}) for own in tied])
        for name, holders in by_name.items():
            if name in aliases[stem]:
                continue
            check_cover(name, holders)
            for position, found in holders:
                for box in found.boxes:
                    sizes[position][PartKey(stem, name, box)] = box.volume * found.itemsize
    return share(sizes, loads), aliases


def _agreed_ties(
    by_name: Mapping[str, Sequence[tuple[int, Holding]]], tied: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Names that every rank that holds a part of them finds to repeat the same other name."""
    agreed = {}
    for name, holders in by_name.items():
        originals = {tied[position].get(name) for position, found in holders if found.boxes}
        original = originals.pop() if len(originals) == 1 else None
        if original is not None:
            agreed[name] = original
    return agreed


def check_cover(name: str, holders: Sequence[tuple[int, Holding]]) -> None:
    """Check that the parts of all ranks together make up a whole tensor.

    Raises:
        UnsupportedValueError: names the missing part, or the ranks that disagree.
    """
    for what in ("shape", "dtype"):
        found = {value: position for position, h in holders if (value := getattr(h, what)) or what == "shape"}
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
