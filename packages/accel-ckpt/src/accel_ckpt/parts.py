"""Parts of tensors that are divided among ranks: a rank's values, and their place in the whole tensor.

A *leaf* of a state is a whole tensor, a ``DTensor``, a :class:`Part`, or a list or tuple of the parts of one tensor.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.geometry import Box, flat_boxes
from accel_ckpt.tensor_storage import copy_values

__all__ = [
    "Leaf",
    "Part",
    "fill_part",
    "fsdp_groups",
    "fsdp_modules",
    "gathered",
    "is_divided",
    "is_leaf",
    "is_sharded",
    "parts_of",
    "reshard",
    "shape_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A rectangular part (box) of a tensor, which this rank holds.

    Args:
        tensor: the values of the box, with the box's shape; may be a view of the memory that training uses.
        offsets: index of its first element in the whole tensor, per dimension.
        shape: shape of the whole tensor.

    A part without elements means that this rank holds nothing of the tensor.

    Raises:
        ValueError: the box does not lie within the shape, or `tensor` is itself divided among ranks.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a box that is not in the tensor."""
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if is_sharded(self.tensor):
            raise ValueError(
                "a Part holds values of this rank alone, and a DTensor was given; pass the DTensor itself"
            )
        sizes = tuple(self.tensor.shape)
        elements: int = math.prod(self.shape)
        if elements and not self.tensor.numel():
            return  # nothing of a tensor, also of one without dimensions
        fits = len(sizes) == len(self.offsets) == len(self.shape) and all(
            0 <= offset <= offset + size <= whole
            for offset, size, whole in zip(self.offsets, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a part of shape {list(sizes)} at {list(self.offsets)} is no box of a tensor of shape "
                f"{list(self.shape)}; give one offset per dimension, so that offset + size is within the shape"
            )

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Part:
        """Make a part of a whole tensor that only this rank holds, such as a weight of its pipeline stage."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @classmethod
    def nothing(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Part:
        """Make an empty part: this rank holds nothing of a tensor of this shape and dtype."""
        return cls(torch.empty((0,) * max(1, len(shape)), dtype=dtype), (0,) * len(shape), tuple(shape))

    @classmethod
    def of_flat(cls, values: torch.Tensor, start: int, shape: Sequence[int]) -> list[Part]:
        """Make the parts for a range of elements of a flattened tensor; views of ``values``.

        For optimizers that divide flattened parameters, such as ZeRO's.

        Args:
            values: the elements of the range, 1-D.
            start: index of the first one in the flattened (row-major) tensor.
            shape: shape of the whole tensor.
        """
        if values.dim() != 1 or not 0 <= start <= start + values.numel() <= math.prod(shape):
            raise ValueError(
                f"elements {start} to {start + values.numel()}, of shape {list(values.shape)}, are no run of a "
                f"flattened tensor of shape {list(shape)}"
            )
        boxes = list(flat_boxes(start, start + values.numel(), shape))
        runs = torch.split(values, [box.volume for box in boxes]) if boxes else ()
        return [
            cls(run.view(box.sizes), box.offsets, tuple(shape)) for run, box in zip(runs, boxes, strict=True)
        ]

    @property
    def box(self) -> Box:
        """The box of the values in the whole tensor."""
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of a tensor that has elements."""
        if self.tensor.numel() or math.prod(self.shape):
            return not self.tensor.numel()
        sizes = tuple(self.tensor.shape)  # of a tensor without elements, any other box is all of it
        return sizes != self.shape and not any(sizes)


Leaf: TypeAlias = torch.Tensor | Part | Sequence[Part]


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def sharded_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters of a module that are ``DTensor``s, by name."""
    return {name: found for name, found in model.named_parameters() if hasattr(found, "full_tensor")}


def is_divided(value: object) -> TypeGuard[Leaf]:
    """Whether a leaf may be divided among ranks: a ``DTensor``, a part, or parts of one tensor."""
    if isinstance(value, torch.Tensor):
        return hasattr(value, "full_tensor")  # as `is_sharded`; every value of a tree is asked
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Part) and all(isinstance(item, Part) for item in value)
    return isinstance(value, Part)


def is_leaf(value: object) -> TypeGuard[Leaf]:
    """Whether an object is a tensor, whole or divided."""
    return isinstance(value, torch.Tensor) or is_divided(value)


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the whole tensor.

    Raises:
        ValueError: the parts in a list belong to tensors of different shapes.
    """
    if isinstance(leaf, torch.Tensor | Part):
        return tuple(leaf.shape)
    shapes = sorted({part.shape for part in leaf})
    if len(shapes) != 1:
        raise ValueError(
            f"a list of parts must hold the parts of one tensor, but these belong to tensors of the shapes "
            f"{list(map(list, shapes))}; make a list for each tensor"
        )
    return shapes[0]


def parts_of(leaf: Leaf) -> list[Part]:
    """The parts of a tensor that this rank holds, without empty ones.

    Raises:
        UnsupportedValueError: a ``DTensor`` has a placement that does not consist of boxes.
        ValueError: see :func:`shape_of`.
    """
    if isinstance(leaf, torch.Tensor):
        parts = list(_parts_of_dtensor(leaf)) if is_sharded(leaf) else [Part.whole(leaf)]
    else:
        parts = [leaf] if isinstance(leaf, Part) else list(leaf)
    if not parts:
        return []
    shape = shape_of(parts)
    held = [part for part in parts if not part.is_empty]
    # Of a tensor without elements one part is all of it.
    return held if math.prod(shape) else [Part.whole(part.tensor.new_empty(shape)) for part in held[:1]]


def fill_part(leaf: Leaf, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole value into a leaf."""
    if isinstance(leaf, torch.Tensor) and not is_sharded(leaf):
        copy_values(leaf, whole)
        return
    for part in parts_of(leaf):
        copy_values(part.tensor, whole[part.box.slices])


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a ``DTensor``. Collective.

    That goes over one dimension of its mesh after the other, because torch warns of several in one call. A strided
    shard is a part of what a later dimension has left, so it comes first; of the others, the last comes first.
    """
    from torch.distributed.tensor import Replicate

    whole = cast(Any, tensor.detach())
    placements = list(whole.placements)
    kinds = [type(placement).__name__ for placement in placements]
    strided = [dimension for dimension, kind in enumerate(kinds) if kind == "_StridedShard"]
    others = [dimension for dimension in reversed(range(len(kinds))) if dimension not in strided]
    for dimension in (*strided, *others):
        placements[dimension] = Replicate()
        whole = whole.redistribute(placements=placements)
    found: torch.Tensor = whole.to_local()
    return found


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that ``fully_shard`` has divided."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else no model can be of it
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                yield module


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP's groups of parameters of a module that ``fully_shard`` has divided; torch has one or several by version."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshard(model: nn.Module) -> None:
    """Let FSDP free the whole weights that a forward may have left in place of a rank's parts."""
    for module in fsdp_modules(model):
        module.reshard()


def _parts_of_dtensor(tensor: Any) -> Iterator[Part]:
    """The boxes of a ``DTensor`` on this rank: one, or with strided shards several."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return
    local, shape = _values(tensor.to_local().detach()), tuple(tensor.shape)
    mesh = tuple(tensor.device_mesh.shape)
    for where, offsets in _boxes(
        shape, tuple(tensor.placements), mesh, tuple(coordinate), tuple(local.shape)
    ):
        yield Part(local[where], offsets, shape)


@lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    local: tuple[int, ...],
) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes of a ``DTensor``: where each is in the local tensor, and its offsets in the whole one.

    torch gives one offset per rank, also where a strided shard has gaps; so the boxes are computed here. Parameters,
    gradients and states have few different divisions, and a save or a load asks for each several times.

    Args:
        shape: of the whole tensor.
        placements: on the mesh.
        mesh: its shape.
        coordinate: of this rank in it.
        local: shape of what this rank holds.
    """
    for splits in _readings(_splits(shape, placements, mesh, coordinate)):
        runs = [_runs(size, [split for split in splits if split.dim == d]) for d, size in enumerate(shape)]
        if tuple(sum(stop - start for start, stop in run) for run in runs) == local:
            break
    else:
        raise UnsupportedValueError(
            f"a DTensor of shape {list(shape)} and placements {placements} holds {list(local)} on this rank, at "
            f"{coordinate} of the mesh {mesh}, which is not what these placements give; pass its Part, or full_tensor()"
        )
    if 0 in local and 0 not in shape:
        return []
    cuts = [list(itertools.accumulate((stop - start for start, stop in run), initial=0)) for run in runs]
    found = []
    for chosen in itertools.product(*(range(len(run)) for run in runs)):
        where = tuple(slice(cut[i], cut[i + 1]) for cut, i in zip(cuts, chosen, strict=True))
        found.append((where, tuple(run[i][0] for run, i in zip(runs, chosen, strict=True))))
    return found


def _values(local: torch.Tensor) -> torch.Tensor:
    """The memory of a rank's part: what a subclass that only says how the part is gathered holds inside.

    Trainings in low precision, such as torchao's in float8, put such a subclass around weights that FSDP divides.
    """
    if not is_traceable_wrapper_subclass(cast(object, local)):
        return local
    wrapper = cast(Any, local)
    attributes, _ = wrapper.__tensor_flatten__()
    inside = [getattr(wrapper, name) for name in attributes]
    alike = [inner for inner in inside if (inner.shape, inner.dtype) == (wrapper.shape, wrapper.dtype)]
    return _values(alike[0].detach()) if len(alike) == 1 else local


@dataclass(frozen=True, slots=True)
class _Split:
    """The division of a dimension of a tensor by a dimension of a mesh."""

    dim: int
    count: int
    index: int
    factor: int
    """The number of pieces of a strided shard, which are divided one by one; else 1."""


def _splits(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[_Split]:
    found = []
    for placement, count, index in zip(placements, mesh, coordinate, strict=True):
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            dim = placement.dim % max(1, len(shape))
            found.append(_Split(dim, count, index, int(getattr(placement, "split_factor", 1))))
        elif kind != "Replicate":
            raise UnsupportedValueError(
                f"a DTensor of shape {list(shape)} has the placement {placement}, of which this rank's "
                "values are no box of the tensor; redistribute() it to Shard or Replicate first"
            )
    return found


def _readings(splits: list[_Split]) -> Iterator[list[_Split]]:
    """The orders in which splits may have been made, the likeliest first.

    Where FSDP divides what TP has left of a dimension, the placements name FSDP first, as a strided shard in the number
    of pieces that TP makes: TP was first. The two readings differ only where sizes are not divisible; then the local
    shape decides.
    """
    strided = [split for split in splits if split.factor > 1]
    if strided and all(
        split.factor == math.prod(later.count for later in splits[at + 1 :] if later.dim == split.dim)
        for at, split in enumerate(splits)
        if split.factor > 1
    ):
        plain = [split for split in splits if split.factor == 1]
        yield [*plain, *(replace(split, factor=1) for split in reversed(strided))]
    yield splits


def _runs(size: int, splits: Sequence[_Split]) -> list[tuple[int, int]]:
    """The ranges of indices that splits leave of a dimension; at least one, which may be empty."""
    runs = [(0, size)]
    for split in splits:
        pieces = _chunks(runs, split.factor)
        runs = _joined(run for piece in pieces for run in _chunks(piece, split.count)[split.index])
    return runs or [(0, 0)]


def _chunks(runs: Sequence[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Divide ranges into `count` parts as ``torch.chunk`` does: equal sizes, the last ones smaller or empty."""
    if count == 1:
        return [list(runs)]
    total = sum(stop - start for start, stop in runs)
    step = -(-total // count)
    return [_taken(runs, i * step, min(total, (i + 1) * step)) for i in range(count)]


def _taken(runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The elements ``begin`` to ``end`` of ranges that are counted through."""
    found, at = [], 0
    for start, stop in runs:
        low, high = max(begin - at, 0), min(end - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
