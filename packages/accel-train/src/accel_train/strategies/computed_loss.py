"""A loss whose gradients are computed already: what a call of an engine returns that runs backward itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["computed_loss"]


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, multiplied: Callable[[float], None]) -> Tensor:
        ctx.multiplied = multiplied
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.multiplied(float(gradients[0]))
        return torch.zeros_like(gradients[0]), None, None


def computed_loss(value: Tensor, multiplied: Callable[[float], None]) -> Tensor:
    """Return a loss whose backward computes nothing.

    Args:
        value: the loss, a 0-d tensor.
        multiplied: called by backward with the factor that the loss was multiplied by after it was returned.
    """
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    loss: Tensor = _Computed.apply(anchor, value, multiplied)  # type: ignore[no-untyped-call]
    return loss
