"""`model.zero_grad()` of a divided model."""

from __future__ import annotations

from torch import nn

from accel_ckpt.parts import reshard

__all__ = ["let_zero_grad_reach_parts"]


def let_zero_grad_reach_parts(model: nn.Module) -> None:
    """Let `model.zero_grad()` drop the gradients of this rank's parts at any time.

    FSDP2 leaves the outermost unit gathered between a forward and its backward. Its parameters are then whole values,
    whose gradients are dropped, while those of the parts stay, and the next backward adds to them. The whole values are
    given up first; the next forward or backward gathers them again.
    """
    plain = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        reshard(model)
        plain(set_to_none)

    model.zero_grad = zero_grad  # type: ignore[method-assign]
