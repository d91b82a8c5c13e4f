"""Noise for samples that ranks draw as one process draws it for the whole batch, so that both compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["RowNoise"]

_SIZED = (torch.rand, torch.randn, torch.randint, torch.normal)
"""Functions that draw a new tensor of a size."""
_LIKE: dict[Any, Callable[..., Tensor]] = {
    torch.rand_like: Tensor.uniform_,
    torch.randn_like: Tensor.normal_,
    torch.randint_like: Tensor.random_,
}
_FILLING = (
    Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
)  # fmt: skip
_DROPOUT = (functional.dropout, torch.dropout)


class RowNoise(TorchFunctionMode):
    """Draws for all rows of the global batch wherever a tensor has one row for each sample of this rank.

    All ranks draw the same numbers from a generator of this object, and each takes its own rows. Other tensors are
    drawn as they are.

    Args:
        place: returns the rows of this rank's batch (0: not known yet), the index of its samples, and how many ranks
            have others.

    Attributes:
        drawn: how many tensors with a row for each sample were drawn, but for dropout.
        attention: calls of attention whose dropout was left out, because it draws inside of its kernel.
    """

    def __init__(self, place: Callable[[], tuple[int, int, int]]) -> None:
        super().__init__()
        self._place = place
        self._generator = torch.Generator().manual_seed(0)
        self.drawn = self.attention = 0

    def begin(self, step: int, backwards: int) -> None:
        """Draw from here on what belongs to a step and to the number of backward passes that it has had."""
        self._generator.manual_seed(step << 16 | backwards)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the functions that draw."""
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
            self.attention += 1
        rows, index, size = self._place()
        if not rows or kwargs.get("generator") is not None:
            return func(*args, **kwargs)

        def whole(shape: Sequence[int]) -> tuple[int, ...]:
            return (shape[0] * size, *shape[1:])

        def own(drawn: Tensor) -> Tensor:
            self.drawn += 1
            return drawn[index * rows : (index + 1) * rows].clone()

        if func in _SIZED:
            shape, before = _size_of(func, args, kwargs)
            if not shape or shape[0] != rows:
                return func(*args, **kwargs)
            wanted = kwargs.pop("requires_grad", False)
            drawn = own(func(*before, **kwargs | {"size": whole(shape), "generator": self._generator}))
            return drawn.requires_grad_(wanted)
        has_rows = (
            bool(args) and isinstance(args[0], Tensor) and args[0].dim() > 0 and args[0].shape[0] == rows
        )
        if not has_rows:
            return func(*args, **kwargs)
        x: Tensor = args[0]
        if func in _LIKE:
            empty = torch.empty(whole(x.shape), dtype=kwargs.get("dtype") or x.dtype, device=x.device)
            bounds = [*args[1:], *(kwargs[name] for name in ("low", "high") if name in kwargs)]
            if func is torch.randint_like and len(bounds) == 1:
                bounds = [0, *bounds]
            drawn = own(_LIKE[func](empty, *bounds, generator=self._generator))
            return drawn.requires_grad_(kwargs.get("requires_grad", False))
        if func in _FILLING and not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
            drawn = func(x.new_empty(whole(x.shape)), *args[1:], generator=self._generator, **kwargs)
            with torch.no_grad():
                return x.copy_(own(drawn))
        if func is torch.bernoulli:
            return (own(self._uniform(whole(x.shape))) < x).to(x.dtype)
        if func in _DROPOUT:
            _, p, training, inplace = _dropout_arguments(*args, **kwargs)
            if training and 0 < p < 1:
                kept = (own(self._uniform(whole(x.shape))) >= p).to(x.device, x.dtype) / (1 - p)
                self.drawn -= 1
                return x.mul_(kept) if inplace else x * kept
        return func(*args, **kwargs)

    def _uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float32)


def _size_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], Sequence[Any]]:
    """The size that a call asks for, empty if it is not known, and the arguments before it."""
    if "size" in kwargs:
        return tuple(kwargs["size"]), args
    sequences = [place for place, value in enumerate(args) if isinstance(value, list | tuple)]
    if sequences:
        return tuple(args[sequences[0]]), args[: sequences[0]]
    if func in (torch.rand, torch.randn) and args and all(type(value) is int for value in args):
        return tuple(args), ()
    return (), args


def _dropout_arguments(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **named: Any
) -> tuple[Tensor, float, bool, bool]:
    return x, p, named.get("train", training), inplace
