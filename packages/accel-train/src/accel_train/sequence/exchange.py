"""Exchanges of a divided sequence that autograd follows: heads for positions, and keys and values of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_sequence", "heads_to_sequence", "precise", "sequence_to_heads"]

HEADS = 1
"""Dimension of the heads in queries, keys and values: (batch, heads, sequence, features)."""
SEQUENCE = 2
"""Dimension of the positions."""


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of numbers of a dtype: float32 at least."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def sequence_to_heads(tensor: Tensor, group: Any) -> Tensor:
    """Ulysses' exchange before attention: from some positions of all heads to all positions of some heads.

    Args:
        tensor: (batch, heads, local positions, features); the number of heads is a multiple of the group's size.
        group: ranks in the order of their positions.

    Returns:
        (batch, heads / ranks, positions, features).
    """
    return _Exchange.apply(tensor, group, HEADS, SEQUENCE)  # type: ignore[no-untyped-call, no-any-return]


def heads_to_sequence(tensor: Tensor, group: Any) -> Tensor:
    """Undo `sequence_to_heads`."""
    return _Exchange.apply(tensor, group, SEQUENCE, HEADS)  # type: ignore[no-untyped-call, no-any-return]


def gather_sequence(tensor: Tensor, group: Any) -> Tensor:
    """Gather the positions of all ranks; gradients are summed over the ranks.

    Args:
        tensor: (batch, heads, local positions, features).
        group: ranks in the order of their positions.

    Returns:
        (batch, heads, positions, features), equal on all ranks.
    """
    return _Gather.apply(tensor, group)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    """Each rank gives every other its part along one dimension, and joins what it receives along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, divided: int, joined: int) -> Tensor:
        ctx.group, ctx.divided, ctx.joined = group, divided, joined
        ranks = dist.get_world_size(group)
        sent = torch.stack(tensor.chunk(ranks, divided))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = _Exchange.apply(gradients[0], ctx.group, ctx.joined, ctx.divided)  # type: ignore[no-untyped-call]
        return given, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        parts = tensor.new_empty((ranks, *tensor.shape))
        dist.all_gather(list(parts.unbind()), tensor.contiguous(), group=group)
        return torch.cat(parts.unbind(), SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        ranks = dist.get_world_size(ctx.group)
        sent = torch.stack(gradient.chunk(ranks, SEQUENCE))
        summands = torch.empty_like(sent)
        dist.all_to_all_single(summands, sent, group=ctx.group)
        # Summed here rather than on the way: sums of 16 bits would lose digits with every rank.
        return summands.sum(0, dtype=precise(gradient.dtype)).to(gradient.dtype), None
