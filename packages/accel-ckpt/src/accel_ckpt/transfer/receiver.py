"""How an inference engine divides weights among its ranks, for what it wants of a transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accel_ckpt.parts import Part

__all__ = ["TensorParallelLayout"]


@dataclass(frozen=True, slots=True)
class TensorParallelLayout:
    """The blocks of weights that one rank of a tensor-parallel engine holds, as values of `WeightTransfer`'s `wants`.

        layout = TensorParallelLayout(rank=1, degree=4)
        wants = {
            "model.norm.weight": norm.weight,
            **layout.fused(gate_up.weight, {"gate_proj.weight": 14336, "up_proj.weight": 14336}),
            "o_proj.weight": layout.row(o_proj.weight),
        }

    Args:
        rank: of this process within its tensor-parallel group.
        degree: number of ranks of that group.

    Raises:
        ValueError: the rank is not below the degree.
    """

    rank: int
    degree: int

    def __post_init__(self) -> None:
        """Refuse a rank that is not below the degree."""
        if not 0 <= self.rank < self.degree:
            raise ValueError(
                f"rank={self.rank} is none of degree={self.degree} ranks; give one from 0 to degree - 1"
            )

    def column(self, tensor: torch.Tensor, rows: int | None = None) -> Part:
        """A weight or bias whose rows (outputs) are divided, such as `up_proj` or an embedding.

        Args:
            tensor: this rank's rows.
            rows: of the whole weight; by default `degree` times those of the tensor. If it is less, as with a padded
                vocabulary, the padding is left as it is.

        Raises:
            ValueError: the rows of all ranks are fewer than those of the weight.
        """
        own = tensor.shape[0]
        whole = own * self.degree if rows is None else rows
        if whole > own * self.degree:
            raise ValueError(
                f"{self.degree} ranks with {own} rows each do not hold a weight of {whole} rows; give each rank a "
                f"tensor of {-(-whole // self.degree)} rows"
            )
        begin = self.rank * own
        held = min(own, max(0, whole - begin))
        shape = (whole, *tensor.shape[1:])
        if not held:
            return Part.nothing(shape, tensor.dtype)
        return Part(tensor.detach()[:held], (begin, *_zeros(tensor)), shape)

    def row(self, tensor: torch.Tensor) -> Part:
        """A weight whose columns (inputs) are divided, such as `down_proj` or `o_proj`. Its bias is whole.

        Args:
            tensor: this rank's columns of all rows.
        """
        rows, columns = tensor.shape
        return Part(tensor.detach(), (0, self.rank * columns), (rows, columns * self.degree))

    def fused(self, tensor: torch.Tensor, rows: Mapping[str, int], *, head_size: int = 1) -> dict[str, Part]:
        """Several weights whose rows are divided, one below the other in one tensor, such as `qkv_proj`.

        Args:
            tensor: this rank's rows of all of them, in the order of `rows`.
            rows: of each whole weight, by the name under which the training offers it.
            head_size: rows that stay together. If a weight has fewer heads than there are ranks, as keys and values of
                grouped attention may, several ranks hold the same head.

        Returns:
            What is wanted, by name.

        Raises:
            ValueError: heads cannot be divided among the ranks, or the tensor has other rows.
        """
        wants: dict[str, Part] = {}
        used = 0
        for name, whole in rows.items():
            begin, count = self._rows(name, whole, head_size)
            if used + count <= tensor.shape[0]:
                values = tensor.detach()[used : used + count]
                wants[name] = Part(values, (begin, *_zeros(tensor)), (whole, *tensor.shape[1:]))
            used += count
        if used != tensor.shape[0]:
            raise ValueError(
                f"rank {self.rank} of {self.degree} holds {used} rows of {dict(rows)} in heads of {head_size}, and the "
                f"tensor has {tensor.shape[0]}"
            )
        return wants

    def _rows(self, name: str, whole: int, head_size: int) -> tuple[int, int]:
        """The first row that this rank holds of a weight, and how many."""
        heads, rest = divmod(whole, head_size)
        alike = max(1, self.degree // max(1, heads))  # ranks that hold the same head
        if rest or not heads or heads * alike % self.degree:
            raise ValueError(
                f"{name!r} has {whole} rows, which {self.degree} ranks cannot divide in heads of {head_size}; the "
                "number of heads must be a multiple of the number of ranks, or divide it"
            )
        count = heads * alike // self.degree * head_size
        return self.rank // alike * count, count


def _zeros(tensor: torch.Tensor) -> tuple[int, ...]:
    """Offsets in the dimensions that are not divided."""
    return (0,) * (tensor.dim() - 1)
