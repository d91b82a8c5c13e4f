"""Parts of tensors that are divided among ranks: a rank's values, and their place in the whole tensor.

A *leaf* of a state is a whole tensor, a ``DTensor``, a :class:`Part`, or a list or tuple of the parts of one tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.divisions import Division, RankMesh, Splits, held_boxes, reading_of, splits_of
from accel_ckpt.geometry import Box, flat_boxes
from accel_ckpt.tensor_storage import copy_values

__all__ = [
    "FlatParts",
    "Leaf",
    "Part",
    "division_of",
    "fill_part",
    "fsdp_groups",
    "fsdp_modules",
    "gathered",
    "has_divided_parameters",
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


class FlatParts(list[Part]):
    """The parts of a tensor whose flattened elements ranks divide evenly, with the rule by which they do.

    Args:
        parts: of this rank.
        division: the rule; it has ``flat``.
    """

    def __init__(self, parts: Sequence[Part], division: Division) -> None:
        super().__init__(parts)
        self.division = division


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


def has_divided_parameters(model: nn.Module) -> bool:
    """Whether a parameter of a model is a ``DTensor``, of which this rank holds a part."""
    reshard(model)
    return any(map(is_sharded, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Let FSDP free the whole weights that a forward may have left in place of a rank's parts."""
    for module in fsdp_modules(model):
        module.reshard()


def _parts_of_dtensor(tensor: Any) -> Iterator[Part]:
    """The boxes of a ``DTensor`` on this rank: one, or with strided shards several."""
    held = _held(tensor)
    if held is not None:
        local, mesh, place, splits, reading = held
        shape = tuple(tensor.shape)
        for where, offsets in held_boxes(shape, splits, mesh, place, reading):
            yield Part(local[where], offsets, shape)


def _held(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], Splits, int] | None:
    """What this rank holds of a ``DTensor``: its values, the mesh's shape, its place there, the splits, their reading.

    None: this rank is not in the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    local, shape = _values(tensor.to_local().detach()), tuple(tensor.shape)
    mesh, place = tuple(tensor.device_mesh.shape), tuple(coordinate)
    splits = splits_of(shape, tensor.placements)
    return local, mesh, place, splits, reading_of(shape, splits, mesh, place, tuple(local.shape))


def division_of(leaf: Leaf, mesh_of: Callable[[Any], RankMesh], rank: int) -> Division | None:
    """The rule by which ranks divide a leaf; ``None`` if none is known, or this rank is not among them.

    Args:
        leaf: of a state.
        mesh_of: returns the ranks of a ``DeviceMesh``.
        rank: this rank, as meshes count.
    """
    if isinstance(leaf, FlatParts):
        place = leaf.division.mesh.coordinate(rank)
        held = tuple(part.box for part in leaf if not part.is_empty)
        fits = place is not None and held == leaf.division.boxes(leaf[0].shape, place)
        return leaf.division if fits and 0 not in leaf[0].shape else None
    if not is_sharded(leaf):
        return None
    tensor: Any = leaf
    found = _held(tensor)
    if found is None or 0 in tensor.shape:
        return None
    _, _, here, splits, reading = found
    mesh = mesh_of(tensor.device_mesh)
    return Division(mesh, splits, reading) if mesh.coordinate(rank) == here else None


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
