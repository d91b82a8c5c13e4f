"""The layout of a training state: how ranks have divided its tensors, and which of them wrote each box.

It says for all ranks together what the headers of their files say one by one, and grows with the tensors, not with the
ranks. From it a reader computes which files hold the boxes that it wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accel_ckpt.divisions import Division, RankMesh, readings
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.forms import OTHERS, check_form, natural, positive
from accel_ckpt.geometry import Box
from accel_ckpt.tensor_storage import DTYPE_NAMES, DTYPES

__all__ = ["LaidOut", "Layout", "SavedBox"]

_SPLIT = (None, [natural])
_FORM = {
    "divisions": [
        {"shape": [positive], "first": natural, "strides": [natural], "ranks": [natural], "splits": [_SPLIT],
         "reading": natural, "flat": (None, [natural])}
    ],
    "tensors": {OTHERS: {OTHERS: {"division": natural, "copy": natural, "dtype": str, "shape": [natural]}}},
    "others": {OTHERS: [str]},
    "aliases": {OTHERS: {OTHERS: str}},
    "versions": {OTHERS: {OTHERS: int}},
}  # fmt: skip


class SavedBox(NamedTuple):
    """A box of a tensor in a file of a rank."""

    rank: int
    number: int
    """Which of the boxes of the tensor that this rank has written it is, from 0."""
    box: Box


class LaidOut(NamedTuple):
    """A tensor that ranks have divided by a rule."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    division: Division
    copy: int
    """Which of the copies was written."""

    def boxes_in(self, wanted: Box) -> Iterator[SavedBox]:
        """The saved boxes that have an element in common with a box, without looking at those of all ranks."""
        for position in self.division.holders(self.shape, wanted):
            boxes = self.division.boxes(self.shape, position)
            rank = self.division.rank_of(position, self.copy)
            for number, box in enumerate(boxes):
                if box.meet(wanted) is not None:
                    yield SavedBox(rank, number, box)


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a training state that were divided by rules, by the stem of their files."""

    tensors: Mapping[str, Mapping[str, LaidOut]] = field(default_factory=dict)
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files of parts that hold tensors that no rule describes."""
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name → the name under which the same tensor was written."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Versions of the modules' state dicts."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        numbers: dict[Division, int] = {}
        tensors = {
            stem: {
                name: {
                    "division": numbers.setdefault(laid.division, len(numbers)),
                    "copy": laid.copy,
                    "dtype": DTYPE_NAMES[laid.dtype],
                    "shape": list(laid.shape),
                }
                for name, laid in named.items()
            }
            for stem, named in self.tensors.items()
        }
        divisions = [
            {
                "shape": list(division.mesh.shape),
                "first": division.mesh.first,
                "strides": list(division.mesh.strides),
                "ranks": list(division.mesh.ranks),
                "splits": [split if split is None else list(split) for split in division.splits],
                "reading": division.reading,
                "flat": division.flat and list(division.flat),
            }
            for division in numbers
        ]
        return {
            "divisions": divisions,
            "tensors": tensors,
            "others": {stem: list(names) for stem, names in self.others.items()},
            "aliases": {stem: dict(named) for stem, named in self.aliases.items()},
            "versions": {stem: dict(named) for stem, named in self.versions.items()},
        }

    @classmethod
    def from_plain(cls, data: Any, world_size: int, what: str) -> Layout:
        """Read what `to_plain` returned.

        Args:
            data: from a file.
            world_size: the number of ranks that saved.
            what: the name of the file, for messages.

        Raises:
            CorruptCheckpointError: it is no layout of so many ranks.
        """
        check_form(data, _FORM, what)
        divisions = [
            _division(entry, world_size, f"{what}: division {n}") for n, entry in enumerate(data["divisions"])
        ]
        tensors = {
            stem: {name: _laid_out(entry, divisions, f"{what}: {name!r}") for name, entry in named.items()}
            for stem, named in data["tensors"].items()
        }
        return cls(tensors, data["others"], data["aliases"], data["versions"])


def _division(entry: Mapping[str, Any], world_size: int, what: str) -> Division:
    shape, ranks = tuple(entry["shape"]), tuple(entry["ranks"])
    mesh = RankMesh(shape, entry["first"], tuple(entry["strides"]), ranks)
    splits = tuple(split if split is None else tuple(split) for split in entry["splits"])
    count = math.prod(shape)
    flat = entry["flat"]
    fits = (
        (flat is None or (len(flat) == 2 and flat[0] > 0 and len(shape) == 1))
        and len(shape) == len(mesh.strides) == len(splits)
        and count <= world_size
        and (len(set(ranks)) == len(ranks) == count if ranks else mesh.is_nested)
        and mesh.last < world_size
        and all(split is None or (len(split) == 2 and 0 < split[1] <= world_size) for split in splits)
    )
    if not fits or entry["reading"] >= len(readings(splits, shape)):
        raise CorruptCheckpointError(
            f"{what} is not one of a mesh of {world_size} ranks: {str(dict(entry))[:200]}. The file is damaged, or "
            "something else wrote it; load another checkpoint"
        )
    return Division(mesh, splits, entry["reading"], flat and (flat[0], flat[1]))


def _laid_out(entry: Mapping[str, Any], divisions: Sequence[Division], what: str) -> LaidOut:
    shape = tuple(entry["shape"])
    if entry["division"] < len(divisions) and entry["dtype"] in DTYPES:
        division = divisions[entry["division"]]
        dims = [split[0] for split in division.splits if split is not None]
        if (
            entry["copy"] < division.copies
            and max(dims, default=-1) < len(shape)
            and math.prod(shape) < 1 << 63
        ):
            return LaidOut(shape, DTYPES[entry["dtype"]], division, entry["copy"])
    raise CorruptCheckpointError(
        f"{what} is laid out as {str(dict(entry))[:200]}, which none of the {len(divisions)} divisions gives. The file "
        "is damaged, or something else wrote it; load another checkpoint"
    )
