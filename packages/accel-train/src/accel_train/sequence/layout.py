"""Which positions of each sequence a rank of context parallelism has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["WHOLE", "SequenceLayout"]


@dataclass(frozen=True)
class SequenceLayout:
    """How positions are divided among ranks.

    Balanced: each sequence is cut into twice as many pieces as there are ranks, and a rank has one from each end: the
    first and the last, the second and the last but one. Under causal attention later positions attend to more, so this
    gives all ranks the same work. Otherwise a rank has one piece, in the order of the ranks.

    Attributes:
        ranks: number of ranks.
        balanced: whether each rank has a piece from each end.
    """

    ranks: int = 1
    balanced: bool = False

    @property
    def count(self) -> int:
        """Number of pieces of a sequence."""
        return self.ranks * (2 if self.balanced else 1)

    def pieces(self, index: int) -> tuple[int, ...]:
        """The numbers of the pieces that a rank has, in the order of the sequence."""
        return (index, self.count - 1 - index) if self.balanced else (index,)

    def cut(self, tensor: Tensor, dim: int, index: int) -> Tensor:
        """Cut a tensor of all positions to those of one rank."""
        pieces = tensor.chunk(self.count, dim)
        return torch.cat([pieces[number] for number in self.pieces(index)], dim)

    def restore(self, tensor: Tensor, dim: int) -> Tensor:
        """Bring positions that are in the order of the ranks into that of the sequence."""
        if not self.balanced:
            return tensor
        pieces = tensor.chunk(self.count, dim)
        return torch.cat([*pieces[::2], *pieces[:0:-2]], dim)


WHOLE = SequenceLayout()
"""One rank has all positions."""
