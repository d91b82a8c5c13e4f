"""Positions of a safetensors file's entries in larger tensors.

The metadata has the key and the fields that torch's ``HuggingFaceStorageReader`` reads, so that it can read the files,
too; therefore a file holds at most one box of a tensor, under the tensor's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.reader import Header, parse_json
from accel_ckpt.parts import Part
from accel_ckpt.tensor_storage import SHARDING_KEY

__all__ = ["EntryPlace", "is_divided", "places_of", "sharding_metadata"]

_OFFSETS_KEY = "saved_offsets"
_SHAPE_KEY = "shape"  # ours: without it a missing last part could not be noticed


def sharding_metadata(parts: Mapping[str, Part]) -> dict[str, str]:
    """The metadata of a safetensors file that holds parts of tensors under the tensors' names."""
    about = {
        name: {_OFFSETS_KEY: list(part.offsets), _SHAPE_KEY: list(part.shape)} for name, part in parts.items()
    }
    return {SHARDING_KEY: json.dumps(about)}


def is_divided(header: Header) -> bool:
    """Whether a safetensors file gives the places of its tensors in larger ones."""
    return SHARDING_KEY in header.metadata


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """The position of a file's entry in its tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...] | None
    """The shape of the whole tensor, if the file gives it; torch's writer does not."""


def places_of(header: Header) -> dict[str, EntryPlace]:
    """Find the position of every entry of a safetensors file; an entry is a whole tensor unless the metadata has one.

    Raises:
        CorruptCheckpointError: the metadata does not fit the entries.
    """
    if not is_divided(header):
        return {n: EntryPlace((0,) * len(entry.shape), entry.shape) for n, entry in header.entries.items()}
    try:
        raw = header.metadata[SHARDING_KEY].encode("utf-8", "surrogatepass")
        saved = parse_json(raw, f"the field {SHARDING_KEY} of {header.file}")
        places = {name: _place(saved[name]) for name in header.entries}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"the field {SHARDING_KEY} of {header.file} gives the places of its tensors, but cannot be read: {error!r}"
        ) from error
    for name, entry in header.entries.items():
        offsets, whole = places[name].offsets, places[name].shape
        sizes = (*offsets, *(whole or ()))
        if {len(offsets), len(offsets if whole is None else whole)} != {len(entry.shape)} or not all(
            0 <= size < 1 << 63 for size in sizes
        ):
            raise CorruptCheckpointError(
                f"{header.file} puts {name!r}, of shape {list(entry.shape)}, at {str(list(offsets))[:80]} of a tensor "
                f"of shape {str(whole)[:80]}"
            )
    return places


def _place(about: Mapping[str, Any]) -> EntryPlace:
    shape = about.get(_SHAPE_KEY)
    return EntryPlace(
        tuple(int(n) for n in about[_OFFSETS_KEY]), None if shape is None else tuple(int(n) for n in shape)
    )
