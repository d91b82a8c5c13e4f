"""Tensors that are divided among ranks (`DTensor`): saved as what each rank holds, loaded into any other division.

torch's Distributed Checkpoint says which box of a tensor a rank holds, and which boxes in files a load needs; the
files are ours. A rank's boxes stand in a safetensors file whose metadata gives their offsets under the key that torch's
``HuggingFaceStorageReader`` reads, so that it can read the folder, too.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError
from accel_ckpt.format.reader import Header, MappedShard
from accel_ckpt.tensor_storage import METADATA_KEYS, SHARDING_KEY, same_tensor_id

__all__ = [
    "Box",
    "BoxFiles",
    "fill_part",
    "is_sharded",
    "load_tensors",
    "local_boxes",
    "overlap",
    "reshard",
    "sharding_metadata",
]

_OFFSETS_KEY = "saved_offsets"
_SHAPE_KEY = "shape"  # ours: without it a missing last part could not be noticed


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that is contiguous in each of its dimensions."""

    name: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def key(self) -> str:
        """What tells it from the other boxes of all tensors."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def local_boxes(tensors: Mapping[str, torch.Tensor]) -> list[Box]:
    """What this rank holds of some ``DTensor``s; where they are replicated, other ranks hold the same boxes."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    boxes = []
    for item in planner.create_local_plan().items:
        local = planner.resolve_data(item)
        data = item.tensor_data
        assert isinstance(local, torch.Tensor), "only tensors were given"
        assert data is not None, "only tensors were given"
        if local.numel() or not data.size.numel():  # an empty part of a tensor that is not empty is no box
            boxes.append(Box(item.index.fqn, tuple(data.chunk.offsets), local.detach(), tuple(data.size)))
    return boxes


def fill_part(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy to a ``DTensor`` the part of a whole value that this rank holds."""
    with torch.no_grad():
        for box in local_boxes({"": tensor}):
            ends = map(operator.add, box.offsets, box.tensor.shape)
            box.tensor.copy_(whole[tuple(map(slice, box.offsets, ends))])


def reshard(model: nn.Module) -> None:
    """Let FSDP give up the whole weights that a forward may have left in place of a rank's parts."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else no model can be of it
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def tied_boxes(boxes: Iterable[Box]) -> dict[str, str]:
    """Names whose boxes are the same memory as those of an earlier name, to that name.

    A rank that holds no box of a tensor cannot tell; one that does speaks for all.
    """
    first: dict[tuple[Any, ...], str] = {}
    named = (
        (box.name, first.setdefault((*same_tensor_id(box.tensor), box.offsets), box.name)) for box in boxes
    )
    return {name: original for name, original in named if name != original and name not in METADATA_KEYS}


def sharding_metadata(boxes: Iterable[Box]) -> dict[str, str]:
    """The metadata of a safetensors file that holds boxes under the names of their tensors."""
    about = {box.name: {_OFFSETS_KEY: list(box.offsets), _SHAPE_KEY: list(box.shape)} for box in boxes}
    return {SHARDING_KEY: json.dumps(about)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its tensor an entry of a file stands."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...] | None
    """Of the whole tensor, if the file says it; torch's writer does not."""


def places_of(header: Header) -> dict[str, Place]:
    """Where every entry of a safetensors file stands; each is a whole tensor unless its metadata says otherwise.

    Raises:
        CorruptCheckpointError: the metadata does not fit the entries.
    """
    try:
        saved = json.loads(header.metadata.get(SHARDING_KEY, "null"))
        places = {
            name: Place((0,) * len(entry.shape), entry.shape) if saved is None else _place(saved[name])
            for name, entry in header.entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{header.file} says in {SHARDING_KEY} where its tensors belong, but not readably: {error!r}"
        ) from error
    for name, entry in header.entries.items():
        offsets = places[name].offsets
        if len(offsets) != len(entry.shape) or min(offsets, default=0) < 0:
            raise CorruptCheckpointError(
                f"{header.file} puts {name!r}, of shape {list(entry.shape)}, at {list(offsets)}"
            )
    return places


def _place(about: Mapping[str, Any]) -> Place:
    shape = about.get(_SHAPE_KEY)
    return Place(
        tuple(int(n) for n in about[_OFFSETS_KEY]), None if shape is None else tuple(int(n) for n in shape)
    )


def overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes, each given by its first corner and the one behind its last, have an element in common."""
    boxes = [(low, high) for low, high in boxes if all(a < b for a, b in zip(low, high, strict=True))]
    if len(boxes) < 2:
        return False
    dimensions = range(len(boxes[0][0]))
    # Along the dimension that is cut most often few boxes stand side by side.
    along = max(dimensions, key=lambda d: len({low[d] for low, _ in boxes}), default=0)
    beside: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(boxes, key=lambda box: box[0][along : along + 1]):
        beside = [other for other in beside if other[1][along] > low[along]] if dimensions else beside
        if any(all(low[d] < b[d] and a[d] < high[d] for d in dimensions) for a, b in beside):
            return True
        beside.append((low, high))
    return False


class BoxFiles:
    """Safetensors files that together hold tensors, whole or in boxes.

    Args:
        files: the files.
        checksum: file name → the xxh3 checksum that the content must have; ``None`` does not check.

    Raises:
        CorruptCheckpointError: boxes of a tensor overlap, leave a hole, or differ in dtype; or a file has another
            checksum.
    """

    def __init__(
        self, files: Iterable[Path], checksum: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self._shards = [MappedShard(path, checksum(path.name)) for path in files]
        self._boxes: dict[str, list[tuple[Place, MappedShard]]] = {}
        self.aliases: dict[str, str] = {}
        for shard in self._shards:
            for name, place in places_of(shard.header).items():
                self._boxes.setdefault(name, []).append((place, shard))
            self.aliases |= shard.header.aliases
        self.shapes = {name: self._shape(name) for name in self._boxes}

    def _shape(self, name: str) -> tuple[int, ...]:
        boxes = [(place, shard.header.entries[name]) for place, shard in self._boxes[name]]
        ends = [[o + n for o, n in zip(place.offsets, entry.shape, strict=True)] for place, entry in boxes]
        shape = boxes[0][0].shape or tuple(max(sizes) for sizes in zip(*ends, strict=True))
        held = sum(math.prod(entry.shape) for _, entry in boxes)
        fit = all(place.shape in (None, shape) for place, _ in boxes) and all(
            len(end) == len(shape) and all(e <= n for e, n in zip(end, shape, strict=True)) for end in ends
        )
        apart = not overlap(
            [(place.offsets, tuple(end)) for (place, _), end in zip(boxes, ends, strict=True)]
        )
        if not fit or not apart or held != math.prod(shape) or len({entry.dtype for _, entry in boxes}) > 1:
            where = ", ".join(sorted(entry.file.name for _, entry in boxes))
            raise CorruptCheckpointError(
                f"the parts of the tensor {name!r} in {where} do not make up one of shape {list(shape)}: a file is "
                "missing, or belongs to another save"
            )
        return shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._boxes[name][0][1].header.entries[name].dtype

    def box(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        """One box, as a view of its file."""
        [found] = [shard for place, shard in self._boxes[name] if place.offsets == offsets]
        return found.tensor(name)

    def boxes(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the boxes of a tensor."""
        return [(place.offsets, shard.header.entries[name].shape) for place, shard in self._boxes[name]]

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together, in memory of its own."""
        result = torch.empty(self.shapes[name], dtype=self.dtype(name), device="cpu")
        for place, shard in self._boxes[name]:
            part = shard.tensor(name)
            result[tuple(slice(o, o + n) for o, n in zip(place.offsets, part.shape, strict=True))] = part
        return result


def load_tensors(files: BoxFiles, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place; of a ``DTensor`` this rank reads what it holds, whatever division was saved.

    Raises:
        StateMismatchError: a name is missing, or has another shape. Before anything is changed.
    """
    problems = [f"it lacks {name}" for name in targets if files.aliases.get(name, name) not in files.shapes]
    for name, tensor in targets.items():
        shape = files.shapes.get(files.aliases.get(name, name))
        if shape is not None and shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(shape)} there and {list(tensor.shape)} here")
    if problems:
        raise StateMismatchError(f"the checkpoint does not fit: {'; '.join(sorted(problems))}")
    with torch.no_grad():
        _read_boxes(files, {files.aliases.get(name, name): tensor for name, tensor in targets.items()})


def _read_boxes(files: BoxFiles, targets: dict[str, Any]) -> None:
    # Every rank knows all headers, so it can plan its own reads without talking to the others.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    metadata = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=files.dtype(name)),
            size=torch.Size(shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in files.boxes(name)
            ],
        )
        for name, shape in files.shapes.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, Metadata(state_dict_metadata=dict(metadata)), is_coordinator=True)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        box = files.box(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
        place = tuple(
            slice(start, start + length)
            for start, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
        target = planner.resolve_tensor(item)
        target.copy_(box[place])
        planner.commit_tensor(item, target)
