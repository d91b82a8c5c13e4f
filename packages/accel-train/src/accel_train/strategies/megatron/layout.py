"""Mapping between Megatron's tensors and the tensors of a transformers model.

Megatron fuses projections and divides them among tensor-parallel ranks. The rule of a Megatron tensor lists the boxes
of the model's tensors that it holds. The boxes are views, so copies in both directions need no other memory, and a rule
works for everything with the shape of a weight: gradients and optimizer states too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from accel_ckpt import Part

__all__ = ["Dims", "FusedHeads", "Gated", "Heads", "Rule", "Vocabulary", "WholeTensor"]


@dataclass(frozen=True)
class Dims:
    """Sizes that determine a rank's share of a tensor.

    Attributes:
        tp_rank: this rank's place in its tensor-parallel group.
        tp_size: ranks of that group.
        vocabulary: entries of the model's vocabulary; Megatron pads it to a multiple of `tp_size`.
        groups: attention heads of keys and values.
        queries: attention heads of queries for each of those.
        head: size of a head.
    """

    tp_rank: int
    tp_size: int
    vocabulary: int
    groups: int
    queries: int
    head: int


class Rule(Protocol):
    """The boxes of the model's tensors that one of Megatron's tensors holds."""

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """Views of `local`, by the name of the model's tensor they belong to."""
        ...


@dataclass(frozen=True)
class WholeTensor:
    """One tensor of the model, divided along a dimension or whole on every rank.

    Attributes:
        name: name of the model's tensor.
        dim: dimension of Megatron's tensor along which ranks divide it; None: it is whole.
        transposed: the model keeps it transposed, as GPT-2 does.
    """

    name: str
    dim: int | None = None
    transposed: bool = False

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """The one box."""
        offsets, shape = [0] * local.dim(), list(local.shape)
        if self.dim is not None:
            offsets[self.dim] = dims.tp_rank * shape[self.dim]
            shape[self.dim] *= dims.tp_size
        return {self.name: [_box(local, offsets, shape, self.transposed)]}


@dataclass(frozen=True)
class Vocabulary:
    """A table with a row per entry of the vocabulary, which Megatron pads.

    Attributes:
        name: the model's tensor.
    """

    name: str

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """The rows that are no padding."""
        rows = local.shape[0]
        start = dims.tp_rank * rows
        count = max(0, min(rows, dims.vocabulary - start))
        shape = (dims.vocabulary, *local.shape[1:])
        if not count:
            return {self.name: [Part.nothing(shape, local.dtype)]}
        return {self.name: [Part(local[:count], (start, *[0] * (local.dim() - 1)), shape)]}


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values, which Megatron keeps group by group in one tensor.

    Attributes:
        names: the model's tensors of queries, keys and values.
    """

    names: tuple[str, str, str]

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """For each group the rows of its queries, of its keys and of its values."""
        found: dict[str, list[Part]] = {name: [] for name in self.names}
        counts = (dims.queries * dims.head, dims.head, dims.head)
        here = dims.groups // dims.tp_size
        row = 0
        for group in range(dims.tp_rank * here, (dims.tp_rank + 1) * here):
            for name, count in zip(self.names, counts, strict=True):
                rest = list(local.shape[1:])
                box = local[row : row + count]
                found[name].append(
                    _box(box, [group * count, *[0] * len(rest)], [dims.groups * count, *rest], False)
                )
                row += count
        return found


@dataclass(frozen=True)
class FusedHeads:
    """Queries, keys and values, which the model keeps in one tensor as well: first all queries, as GPT-2 does.

    Attributes:
        name: the model's tensor.
        transposed: the model keeps it transposed.
    """

    name: str
    transposed: bool = False

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """Three boxes for each group."""
        found = []
        counts = (dims.queries * dims.head, dims.head, dims.head)
        starts = (0, dims.groups * counts[0], dims.groups * (counts[0] + counts[1]))
        here = dims.groups // dims.tp_size
        rest = list(local.shape[1:])
        shape = [dims.groups * sum(counts), *rest]
        row = 0
        for group in range(dims.tp_rank * here, (dims.tp_rank + 1) * here):
            for start, count in zip(starts, counts, strict=True):
                offsets = [start + group * count, *[0] * len(rest)]
                found.append(_box(local[row : row + count], offsets, shape, self.transposed))
                row += count
        return {self.name: found}


@dataclass(frozen=True)
class Gated:
    """The two projections of a gated unit, which Megatron keeps one after the other in one tensor.

    Attributes:
        names: the model's tensors: the projection with the activation, and the one it is multiplied by.
    """

    names: tuple[str, str]

    def parts(self, local: Tensor, dims: Dims) -> Mapping[str, list[Part]]:
        """A half each."""
        count = local.shape[0] // 2
        rest = list(local.shape[1:])
        offsets = [dims.tp_rank * count, *[0] * len(rest)]
        shape = [dims.tp_size * count, *rest]
        return {
            name: [_box(local[place * count : (place + 1) * count], offsets, shape, False)]
            for place, name in enumerate(self.names)
        }


def _box(view: Tensor, offsets: list[int], shape: list[int], transposed: bool) -> Part:
    if transposed and view.dim() == 2:
        return Part(view.t(), tuple(offsets[::-1]), tuple(shape[::-1]))
    return Part(view, tuple(offsets), tuple(shape))
