"""Whether a model of the script's own computes each position without counting those of its rank.

Ranks have parts of each sequence, and attention alone joins them. A model of which that is true computes the same for
positions in another order, if all positions attend to all: so one part of one rank tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from accel_state.trees import flatten, recursively_apply
from accel_train.errors import PrepareError

__all__ = ["try_turned"]


class _ToAll(TorchFunctionMode):
    """Attention of all positions of this rank to all of them.

    Attributes:
        low: it was computed in 16 bits.
    """

    low = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, options = _without_mask(*args, **(kwargs or {}))
        self.low = self.low or query.dtype in (torch.float16, torch.bfloat16)
        return func(query, key, value, **options)


def _without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    return query, key, value, options


def try_turned(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, *, losses: bool
) -> None:
    """Compare the outputs for this rank's positions with those for the same positions in reverse order.

    Args:
        model: its forward runs three times, without hooks of its own; not changed.
        args: its arguments in this step.
        kwargs: the others.
        name: the degrees that divide sequences.
        losses: also compare outputs without positions.

    Raises:
        PrepareError: they differ, and not from run to run.
    """
    given = [tensor for tensor in _tensors((args, kwargs)) if tensor.dim() >= 2]
    if not given or given[0].shape[1] < 2:
        return
    rows, length = given[0].shape[:2]

    def turned(tensor: Tensor) -> Tensor:
        return tensor.flip(1) if tensor.dim() >= 2 and tensor.shape[1] == length else tensor

    mode = _ToAll()
    with _untouched(model), mode:
        # Not its call: FSDP has gathered the parameters before this, and would divide them again after each.
        once, again = (_outputs(model.forward(*args, **kwargs)) for _ in range(2))
        other = _outputs(
            model.forward(*recursively_apply(turned, args), **recursively_apply(turned, dict(kwargs)))
        )
    for first, second, reverse in zip(once, again, other, strict=True):
        by_position = first.shape[:2] == (rows, length)
        near = (3e-2 if mode.low else 1e-3) * (1.0 if by_position else 0.1)
        if not (by_position or (losses and not first.dim())) or not _near(first, second, near):
            continue
        if not _near(first, reverse, near) and not (by_position and _near(first, turned(reverse), near)):
            raise PrepareError(
                f"{type(model).__name__} computes something else for the same positions in another order, so it takes "
                f"the part of a sequence that {name} gives each rank for a whole one: it counts positions itself, or "
                "joins neighbours. Take the positions from an argument position_ids, and let attention alone join "
                "positions; or leave out cp_size and sp_size."
            )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Context in which a model may be evaluated: it is as before afterwards, and so are random generators."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in kept:
            buffer.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _outputs(found: Any) -> list[Tensor]:
    """The tensors of an output that are real numbers; of divided ones this rank's parts."""
    tensors = (getattr(tensor, "to_local", lambda own=tensor: own)() for tensor in _tensors(found))
    return [tensor.float() for tensor in tensors if tensor.is_floating_point()]


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    size = one.abs().max().item() if one.numel() else 0.0
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0, atol=tolerance * size, equal_nan=True
    )
