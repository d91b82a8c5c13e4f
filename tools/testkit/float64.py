"""Models in float64 whose code asks for float32 in places: norms, routers, losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Float64"]


class Float64(TorchFunctionMode):
    """A context in which what asks for float32 gets float64, so that references are exact to 15 digits.

    Rounding to float32 in the middle of a model makes gradients depend on the scale of the loss, in their eighth digit.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation with float64 in the place of float32."""
        func = Tensor.double if func is Tensor.float else func
        args = tuple(_wide(value) for value in args)
        return func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
