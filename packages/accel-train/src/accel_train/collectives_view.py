"""The part of `Accelerator` that exchanges tensors with the other processes."""

from __future__ import annotations

from typing import TypeVar

from accel_state.communication import collectives

__all__ = ["CollectivesView"]

T = TypeVar("T")


class CollectivesView:
    """Collectives of all processes, under the names that `Accelerator` has for them; types stay."""

    def gather(self, tensor: T) -> T:
        """Tensors of all ranks, concatenated along the first dimension in rank order; nested structures too."""
        gathered: T = collectives.gather(tensor)
        return gathered

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """The sum (or "mean", "max", "min") over ranks, multiplied by `scale`; nested structures too."""
        reduced: T = collectives.reduce(tensor, reduction=reduction, scale=scale)
        return reduced

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Tensors padded along `dim` to the longest of all ranks."""
        padded: T = collectives.pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )
        return padded
