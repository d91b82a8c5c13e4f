"""The part of `Accelerator` that exchanges tensors with the other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from accel_state.operations import collectives, differentiable
from accel_state.world.process import PartialState

if TYPE_CHECKING:
    from accel_train.loop.accumulation import Accumulator

__all__ = ["CollectivesView"]

T = TypeVar("T")


class CollectivesView:
    """Collectives of all processes, under the names that `Accelerator` has for them; types stay."""

    _process: PartialState
    _accumulator: Accumulator
    flag_tensor: Tensor | None

    def gather(self, tensor: T) -> T:
        """Tensors of all ranks, concatenated along the first dimension in rank order; nested structures too.

        The result has no gradient; `gather_with_grad` has one.
        """
        gathered: T = collectives.gather(tensor)
        return gathered

    def gather_with_grad(self, tensor: T, *, ragged: bool = False) -> T:
        """As `gather`, and gradients flow back to every rank's tensors, for a loss over the samples of all ranks.

        With gradients averaged over ranks the result is that of one big batch. All ranks must use it in their loss.

        Args:
            tensor: nested tensors; those that require no gradient, such as labels, are gathered as they are.
            ragged: allow first dimensions that differ between ranks.
        """
        self._accumulator.expect_equal_losses()
        gathered: T = differentiable.gather_with_grad(tensor, ragged=ragged)
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

    def set_trigger(self) -> None:
        """Raise this rank's flag; `check_trigger` then answers True on every rank, once."""
        self.flag_tensor = torch.tensor(1, device=self._process.device)

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since the last True; every rank must ask."""
        flag = self.flag_tensor
        raised = torch.tensor(0, device=self._process.device) if flag is None else flag
        if collectives.reduce(raised, reduction="sum").item() < 1:
            return False
        self.flag_tensor = None
        return True
