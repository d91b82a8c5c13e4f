"""Attention of local queries to the keys and values of all ranks, which pass from rank to rank.

No rank holds the keys and values of more than two ranks at a time. Partial results are joined by the logarithms of
their softmax denominators, as in ring attention (Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.sequence.exchange import SEQUENCE, precise

__all__ = ["Visible", "attend", "attend_backward", "ring_attention", "visible"]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
    *,
    is_causal: bool,
    scale: float,
    balanced: bool = False,
) -> Tensor:
    """Attention over a sequence that is divided evenly among the ranks of a group.

    Args:
        query: (batch, heads, local positions, features).
        key: the same shape.
        value: the same shape.
        group: the ranks.
        is_causal: positions attend to themselves and to earlier ones.
        scale: factor of the scores.
        balanced: the layout: each rank has a piece from each end; otherwise one piece, in the order of the ranks.

    Returns:
        A tensor like `query`.
    """
    return _Ring.apply(query, key, value, group, is_causal, scale, balanced)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True)
class Visible:
    """What a rank computes with the keys of another: some of its queries attend to some of them."""

    queries: slice
    keys: slice
    is_causal: bool


_ALL = slice(None)


def visible(rank: int, source: int, is_causal: bool, half: int | None) -> Visible | None:
    """What a rank computes with the keys of `source`; None: nothing.

    Args:
        rank: whose queries.
        source: whose keys.
        is_causal: positions attend to themselves and to earlier ones.
        half: number of positions in each of two pieces; None: one piece.
    """
    if not is_causal or source == rank:
        return Visible(_ALL, _ALL, is_causal)
    if source < rank:  # its late piece comes after both of this rank's pieces
        return Visible(_ALL, slice(half), False)
    return None if half is None else Visible(slice(half, None), _ALL, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: Any,
        is_causal: bool,
        scale: float,
        balanced: bool,
    ) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        visiting = torch.stack((key, value))
        output = query.new_zeros(query.shape, dtype=precise(query.dtype))
        total = output.new_full(query.shape[:-1], -torch.inf)
        half = query.shape[SEQUENCE] // 2 if balanced else None
        for turn in range(ranks):
            source = (rank - turn) % ranks
            coming = _Passing(visiting, group, rank, ranks) if turn < ranks - 1 else None
            part_of = visible(rank, source, is_causal, half)
            if part_of is not None:
                rows, columns = part_of.queries, part_of.keys
                part, logs = _attend(
                    query[:, :, rows],
                    visiting[0][:, :, columns],
                    visiting[1][:, :, columns],
                    part_of.is_causal,
                    scale,
                )
                before = total[:, :, rows]
                joint = torch.logaddexp(before, logs)
                output[:, :, rows] *= (before - joint).exp().unsqueeze(-1)
                output[:, :, rows] += part * (logs - joint).exp().unsqueeze(-1)
                total[:, :, rows] = joint
            if coming is not None:
                visiting = coming.wait()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.group, ctx.is_causal, ctx.scale, ctx.half = group, is_causal, scale, half
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, total = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dtype = precise(query.dtype)
        visiting = torch.stack((key, value))
        sums = torch.zeros_like(visiting, dtype=dtype)  # of the gradients of the visiting keys and values
        for_query = torch.zeros_like(query, dtype=dtype)
        for turn in range(ranks):
            source = (rank - turn) % ranks
            coming = _Passing(visiting, ctx.group, rank, ranks) if turn < ranks - 1 else None
            part_of = visible(rank, source, ctx.is_causal, ctx.half)
            if part_of is not None:
                rows, columns = part_of.queries, part_of.keys
                found = _attend_backward(
                    gradients[0][:, :, rows],
                    query[:, :, rows],
                    visiting[0][:, :, columns],
                    visiting[1][:, :, columns],
                    output[:, :, rows],
                    total[:, :, rows].contiguous(),
                    part_of.is_causal,
                    ctx.scale,
                )
                for_query[:, :, rows] += found[0]
                sums[0][:, :, columns] += found[1]
                sums[1][:, :, columns] += found[2]
            # Gradients travel with what they belong to, and one turn further: home.
            sums = _Passing(sums, ctx.group, rank, ranks).wait()
            if coming is not None:
                visiting = coming.wait()
        found = for_query.to(query.dtype), sums[0].to(key.dtype), sums[1].to(value.dtype)
        return *found, None, None, None, None


class _Passing:
    """A tensor on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, tensor: Tensor, group: Any, rank: int, ranks: int) -> None:
        self._arrives = torch.empty_like(tensor)
        self._sent = tensor.contiguous()
        after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._arrives, before, group),
            ]
        )

    def wait(self) -> Tensor:
        for request in self._requests:
            request.wait()
        return self._arrives


def _attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to some keys, and the logarithm of the softmax denominator of each query."""
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        output, logs = kernels._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return output, logs
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        found = kernels._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return found[0], found[1]
    return attend(query, key, value, is_causal, scale)


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention without a fused kernel, for devices and dtypes that have none: all scores exist at once.

    Returns:
        The output, in float32 or more, and the logarithm of the softmax denominator of each query.
    """
    scores = _scores(query, key, is_causal, scale)
    logs = scores.logsumexp(-1)
    return (scores - logs.unsqueeze(-1)).exp() @ value.to(scores.dtype), logs


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logs: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summands of the gradients that come from some keys, given output and denominators over all keys."""
    kernels = torch.ops.aten
    if query.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logs, 0.0, is_causal, scale=scale
        )
        return found
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        nothing = torch.zeros((), dtype=torch.uint64, device=query.device)  # no dropout: no random numbers
        sizes = (None, None, query.shape[2], key.shape[2])
        given = (gradient, query, key, value, output, logs, *sizes, 0.0, is_causal, nothing, nothing)
        found = kernels._scaled_dot_product_flash_attention_backward(*given, scale=scale)
        return found[0], found[1], found[2]
    return attend_backward(gradient, query, key, value, output, logs, is_causal, scale)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logs: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `attend`, without a fused kernel; gradients of query, key and value in float32 or more."""
    weights = (_scores(query, key, is_causal, scale) - logs.unsqueeze(-1)).exp()
    gradient = gradient.to(weights.dtype)
    through = gradient @ value.to(weights.dtype).transpose(-2, -1)
    mean = (gradient * output.to(weights.dtype)).sum(-1, keepdim=True)
    for_scores = weights * (through - mean) * scale
    return (
        for_scores @ key.to(weights.dtype),
        for_scores.transpose(-2, -1) @ query.to(weights.dtype),
        weights.transpose(-2, -1) @ gradient,
    )


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    dtype = precise(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).transpose(-2, -1) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
