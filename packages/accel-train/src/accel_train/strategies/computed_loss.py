"""Losses whose gradients are computed already: what calls of an engine return that run backward themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_train.errors import AccumulationError

__all__ = ["ComputedLosses", "raw_backward"]


def raw_backward() -> AccumulationError:
    """The error for a loss that did not go through `accelerator.backward`."""
    return AccumulationError(
        "A loss of the model went to loss.backward(), which ends at what the last stage returned. Call "
        "accelerator.backward(loss), which goes through all stages of the pipeline."
    )


class _Call:
    """A call that has computed gradients.

    Attributes:
        reached: a backward went through its loss.
        dropped: its gradients are gone.
    """

    def __init__(self, factor: float, rescale: Callable[[float], None]) -> None:
        self._factor, self._rescale = factor, rescale
        self.reached = self.dropped = False

    def reach(self, given: float) -> None:
        """Backward goes through its loss, with a factor."""
        if self.dropped:
            raise AccumulationError(
                "zero_grad() was called between a call of the model and accelerator.backward(), and with this schedule "
                "the call computes the gradients: they are lost. Call zero_grad() before the model, or after the step."
            )
        self.reached = True
        if abs(given - self._factor) > 1e-6 * abs(self._factor):
            self._rescale(given / self._factor)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.reach(float(gradients[0]))
        return torch.zeros_like(gradients[0]), None, None


class ComputedLosses:
    """The losses of a model whose calls compute gradients, from the call until `accelerator.backward`.

    Gradients of a call are added to those of the calls before it. So a loss that the script leaves out, as a guard
    against bad batches does, is an error in the step, unless `zero_grad()` has dropped the gradients.
    """

    def __init__(self) -> None:
        self._open: list[_Call] = []

    def of_call(self, value: Tensor, factor: float, rescale: Callable[[float], None]) -> Tensor:
        """Return a loss whose backward computes nothing.

        Args:
            value: the loss, a 0-d tensor.
            factor: the gradients are those of the loss multiplied by it.
            rescale: called by backward if the loss was multiplied by another factor, with the quotient of both.
        """
        call = _Call(factor, rescale)
        self._open.append(call)
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        loss: Tensor = _Computed.apply(anchor, value, call)  # type: ignore[no-untyped-call]
        return loss

    def account(self) -> None:
        """`accelerator.backward` has ended: losses that it went through are done."""
        self._open = [call for call in self._open if not call.reached]

    def drop(self) -> None:
        """Gradients are dropped; a later backward of one of their losses is an error."""
        for call in self._open:
            call.dropped = True
        self._open.clear()

    def check(self, remedy: str) -> None:
        """Check that all losses went through `accelerator.backward`.

        Args:
            remedy: what else the script can do to leave a batch out.

        Raises:
            AccumulationError: one went to `loss.backward()`, or to no backward.
        """
        if not self._open:
            return
        if any(call.reached for call in self._open):
            raise raw_backward()
        count = len(self._open)
        whose = "The loss of a call" if count == 1 else f"The losses of {count} calls"
        raise AccumulationError(
            f"{whose} of the model did not go to accelerator.backward(), and its gradients are added to those of other "
            "calls: with this schedule the call of the model computes them. To leave a batch out, call "
            f"optimizer.zero_grad() after its call, before that of the next batch; or {remedy}."
        )
