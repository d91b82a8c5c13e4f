"""Sequences divided among ranks, as Megatron-core's layers expect it.

Each rank has a piece from each end, as the balanced `SequenceLayout` says. Megatron-core's rotary embeddings are cut in
this order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_train.errors import DataError
from accel_train.sequence.exchange import gather_sequence
from accel_train.sequence.layout import SequenceLayout

__all__ = ["ContextPart"]


@dataclass(frozen=True)
class ContextPart:
    """The positions of each sequence that a rank has.

    Attributes:
        group: ranks that have the same sequences.
        index: index of this rank.
        parts: number of ranks.
    """

    group: Any
    index: int
    parts: int

    @classmethod
    def of(cls, group: Any) -> ContextPart:
        """This rank's part in a process group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def pieces(self) -> tuple[int, ...]:
        """The numbers of this rank's two pieces."""
        return self._layout.pieces(self.index)

    @property
    def _layout(self) -> SequenceLayout:
        return SequenceLayout(self.parts, balanced=True)

    def check(self, length: int, divisions: int = 1) -> None:
        """Check that sequences can be cut.

        Args:
            length: length of the sequences.
            divisions: number of equal parts into which each rank's positions are divided further.

        Raises:
            DataError: sequences of this length cannot be cut.
        """
        multiple = math.lcm(2, divisions) * self.parts
        if length % multiple:
            why = "each rank has two pieces of equal length"
            if divisions > 1:
                why += f", which sequence_parallelism divides among tp_degree={divisions} ranks"
            raise DataError(
                f"A batch has sequences of {length} tokens, which context_parallel_size={self.parts} cannot divide: "
                f"{why}, so lengths must be multiples of {multiple}. Pad them, as "
                f"`pad_to_multiple_of={multiple}` of transformers' collators does."
            )

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Cut a tensor to this rank's positions.

        Args:
            tensor: a tensor of all positions, whose length `check` has accepted.
            dim: dimension of the positions.
        """
        return self._layout.cut(tensor, dim, self.index)

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Gather the positions of all ranks, in order. Gradients are summed over the ranks.

        If all ranks compute the same from the result, this multiplies gradients by the number of ranks. Data
        parallelism takes their mean over ranks, which is then the sum over all positions.

        Args:
            tensor: a tensor of this rank's positions.
            dim: dimension of the positions.
        """
        # Positions are in the third dimension there.
        gathered = gather_sequence(tensor.movedim(dim, 0)[None, None], self.group).squeeze((0, 1))
        return self._layout.restore(gathered, 0).movedim(0, dim)
