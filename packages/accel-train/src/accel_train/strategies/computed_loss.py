"""A loss whose gradients are computed already: what a call of an engine returns that runs backward itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["computed_loss"]


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, factor: float, rescale: Callable[[float], None]
    ) -> Tensor:
        ctx.factor, ctx.rescale = factor, rescale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given, factor = float(gradients[0]), ctx.factor
        if abs(given - factor) > 1e-6 * abs(factor):
            ctx.rescale(given / factor)
        return torch.zeros_like(gradients[0]), None, None, None


def computed_loss(value: Tensor, factor: float, rescale: Callable[[float], None]) -> Tensor:
    """Return a loss whose backward computes nothing.

    Args:
        value: the loss, a 0-d tensor.
        factor: the gradients are those of the loss multiplied by it.
        rescale: called by backward if the loss was multiplied by another factor, with the quotient of both.
    """
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    loss: Tensor = _Computed.apply(anchor, value, factor, rescale)  # type: ignore[no-untyped-call]
    return loss
