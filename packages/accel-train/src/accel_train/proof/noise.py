"""Noise that is of a sample and not of a rank, so that ranks compute what one process computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

__all__ = ["RowNoise"]

_DRAWING = (
    torch.rand, torch.randn, torch.randint, torch.normal, torch.randperm, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.bernoulli, torch.binomial, torch.poisson, torch._standard_gamma, torch._sample_dirichlet,
    Tensor.bernoulli, functional.rrelu,
)  # fmt: skip
# Functions that draw one of the values in a row.
_CHOOSING = (torch.multinomial, Tensor.multinomial, functional.gumbel_softmax)
_FILLING = (
    Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
)  # fmt: skip
_DROPOUT = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
)  # fmt: skip
"""Functions that take a chance of dropout, as the only `float` of their positional arguments."""
_entered: list[RowNoise] = []
_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _drawing(*args: Any, **kwargs: Any) -> Any:
    """A backward pass, which torch keeps modes out of, with what it computes again."""
    with _entered[-1] if _entered else nullcontext():
        return _run_backward(*args, **kwargs)


torch.autograd._engine_run_backward = _drawing  # type: ignore[attr-defined] # only proofs import this module


class RowNoise(TorchFunctionMode):
    """Draws the rows of a tensor that has one for each sample of this rank from seeds of these samples.

    Each draw takes one number from torch's generator, whatever it draws. So ranks whose generators are alike stay
    alike, and what is computed again, as by `torch.utils.checkpoint`, draws the same. Dropout is left out: tokens,
    nodes and parts of a sequence have no row for each sample. What a model in float64 converts to float32, such as its
    logits, stays as it is. Of several that are entered the newest alone does all this.

    Args:
        seeds: the seed of each sample of this rank, by how many there are; loaders that are read in turn may have
            batches of several sizes. Nothing is drawn by them while it is empty.
        double: the proof is in float64.

    Attributes:
        drawn: how many tensors with a row for each sample were drawn.
        dropout: how many calls asked for dropout.
    """

    def __init__(self, seeds: Mapping[int, Sequence[int]], *, double: bool = False) -> None:
        super().__init__()
        self._seeds, self._double = seeds, double
        self.drawn = self.dropout = 0

    def __enter__(self) -> Self:
        """Draw so from now on."""
        _entered.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Draw as before."""
        _entered.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the functions that draw, and those that convert to float32."""
        kwargs = dict(kwargs or {})
        if self is not _entered[-1]:
            return func(*args, **kwargs)
        if self._double and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [_doubled(value) for value in args]
            kwargs = {name: value if name == "out" else _doubled(value) for name, value in kwargs.items()}
        if func in _DROPOUT:
            return self._without_dropout(func, args, kwargs)
        if func not in (*_DRAWING, *_CHOOSING, *_FILLING):
            return func(*args, **kwargs)
        shape, args, kwargs = _shape_of(func, args, kwargs)
        seeds = self._seeds.get(shape[0], ()) if len(shape) > (func in _CHOOSING) else ()
        if kwargs.get("generator") is not None:
            if not seeds:
                return func(*args, **kwargs)
            kwargs["generator"] = None  # ranks may have seeded theirs by their rank
        key = int(torch.randint(2**62, ()))
        before = torch.get_rng_state()
        try:
            if not seeds:
                torch.manual_seed(key)
                return func(*args, **kwargs)
            self.drawn += 1
            wanted = kwargs.pop("requires_grad", False)
            if "size" in kwargs:
                kwargs["size"] = (1, *shape[1:])
            rows = []
            for row, seed in enumerate(seeds):
                torch.manual_seed(key ^ seed)
                own = {name: _row_of(value, row, seeds) for name, value in kwargs.items()}
                rows.append(func(*(_row_of(value, row, seeds) for value in args), **own))
        finally:
            torch.set_rng_state(before)
        if func in _FILLING:
            return args[0]
        return torch.cat(rows).requires_grad_() if wanted else torch.cat(rows)

    def _without_dropout(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1:
            kwargs.setdefault("p", 0.5)
        named = {name: 0.0 for name in ("p", "dropout_p") if kwargs.get(name)}
        self.dropout += bool(named) or any(isinstance(value, float) and value > 0 for value in args)
        return func(*(0.0 if isinstance(value, float) else value for value in args), **kwargs | named)


def _doubled(value: Any) -> Any:
    """A dtype of 32 bits, or data in it, which a loss is in that has a part of it, as one of 64."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and not isinstance(value, Parameter):
        return value.double()
    return torch.float64 if value is torch.float32 else value


def _row_of(value: Any, row: int, seeds: Sequence[int]) -> Any:
    """The part of an argument that is of one row."""
    has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == len(seeds)
    return value[row : row + 1] if has_rows else value


def _shape_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], Sequence[Any], dict[str, Any]]:
    """The shape of what a call draws, empty if it is not known, and its arguments, in which a size is named."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return tuple(value.shape), args, kwargs
    if "size" in kwargs:
        return tuple(kwargs["size"]), args, kwargs
    for place, value in enumerate(args):
        if isinstance(value, list | tuple):
            return tuple(value), args[:place], {**kwargs, "size": tuple(value)}
    if func in (torch.rand, torch.randn):
        return tuple(args), (), {**kwargs, "size": tuple(args)}
    return (), args, kwargs
