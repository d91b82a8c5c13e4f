"""Communication hooks of DDP that torch's own do not cover."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

__all__ = ["batched_power_sgd", "on_any_backend"]


def batched_power_sgd(state: PowerSGDState, bucket: Any) -> torch.futures.Future[Tensor]:
    """PowerSGD of a whole bucket as one square matrix, filled up with zeros.

    torch's `batched_powerSGD_hook` fails in its first compressed reduction: it passes a matrix where a batch of them is
    expected. This is `powerSGD_hook` on a bucket with one gradient.
    """
    values: Tensor = bucket.buffer()
    square = _SquareBucket(bucket, values)

    def cut(done: torch.futures.Future[Any]) -> Tensor:
        found = done.value()  # a plain all-reduce gives a list of one tensor
        whole: Tensor = found[0] if isinstance(found, list) else found
        values.copy_(whole[: values.numel()])
        return values

    future: torch.futures.Future[Tensor] = powerSGD_hook(state, square).then(cut)
    return future


class _SquareBucket:
    """A bucket of DDP as one with a single, square gradient."""

    def __init__(self, bucket: Any, values: Tensor) -> None:
        self.index = bucket.index
        self.is_last = bucket.is_last
        self._side = math.isqrt(values.numel() - 1) + 1
        self._padded = values.new_zeros(self._side**2)
        self._padded[: values.numel()] = values

    def buffer(self) -> Tensor:
        """All values and the zeros after them."""
        return self._padded

    def gradients(self) -> list[Tensor]:
        """The same as a matrix."""
        return [self._padded.view(self._side, self._side)]


def on_any_backend(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bf16 hook, which DDP refuses by name in builds without CUDA or XPU, although gloo reduces bfloat16."""

    def communicate(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    communicate.__annotations__.clear()  # DDP compares them with types, and these are strings
    return communicate
