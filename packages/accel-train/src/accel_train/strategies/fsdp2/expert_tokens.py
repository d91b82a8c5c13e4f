"""Tokens on their way to the ranks that hold their experts, and results on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.communication.torch_collectives import all_gather_single
from accel_train.ranks import Ranks

__all__ = ["Compute", "Tokens"]

Compute = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""Computes rows, with the number of each row's expert on this rank, and how many rows each expert has."""


class Tokens:
    """Sends tokens of one layer by an all-to-all, and results back by another one; counts tokens.

    Ranks of tensor parallelism have the same tokens. Each sends its share of them, and they gather the results.

    Args:
        name: of the layer in its model.
        count: its experts.
        group: the ranks that hold all experts together, in the order of their experts.
        alike: ranks that have the same tokens, which `group` may include.

    Attributes:
        name: see above.
        here: how many experts this rank has.
        repeats: how many ranks have the same tokens.
        share: what a rank's gradient of an expert is to be multiplied by, so that the mean over the ranks which hold
            the same experts is the mean over all ranks that have other tokens.
        sent: how many tokens each expert last got from this rank.
    """

    def __init__(self, name: str, count: int, group: Any, alike: Ranks) -> None:
        self.name = name
        self._count = count
        self._group = group
        self._alike = alike
        self._ranks = dist.get_world_size(group)
        self.here = count // self._ranks
        self.repeats = alike.size
        self.share = alike.size / self._ranks
        self.sent: list[int] = []
        self._counts: Tensor | None = None

    def route(self, hidden_states: Tensor, indices: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (tokens, features).
            indices: (tokens, k), numbers of experts.
            weights: (tokens, k).
            compute: computes this rank's experts.
        """
        tokens, k = indices.shape
        dtype = hidden_states.dtype
        hidden_states, indices, weights = map(self._taken, (hidden_states, indices, weights))
        number = indices.reshape(-1)
        order = torch.argsort(number, stable=True)
        results = self._sent(hidden_states[order // k], number, compute)
        placed = torch.empty_like(results).index_copy(0, order, results).view(-1, k, results.shape[-1])
        return self._joined((placed * weights.reshape(-1, k, 1)).sum(1), tokens).to(dtype)

    def each(self, rows: Tensor, number: Tensor, compute: Compute) -> Tensor:
        """The result of each row's expert.

        Args:
            rows: (rows, features).
            number: of the expert of each row.
            compute: computes this rank's experts.
        """
        count = rows.shape[0]
        rows, number = self._taken(rows), self._taken(number)
        order = torch.argsort(number, stable=True)
        results = self._sent(rows[order], number, compute)
        return self._joined(torch.empty_like(results).index_copy(0, order, results), count)

    def total(self, device: torch.device) -> Tensor:
        """How many tokens each expert has got from all ranks since the last call: (experts,). Collective.

        Args:
            device: where they compute.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            counts = torch.zeros(self._count, dtype=torch.int64, device=device)
        dist.all_reduce(counts)
        return counts

    def _sent(self, rows: Tensor, number: Tensor, compute: Compute) -> Tensor:
        """Results for rows in the order of their experts, whose numbers are in any order."""
        sent = number.new_zeros(self._count).scatter_add_(0, number, torch.ones_like(number))
        self._note(sent)
        received = torch.empty_like(sent)  # from each rank, for each expert of this one
        dist.all_to_all_single(received, sent, group=self._group)
        # The one time that the host waits for the device.
        going, coming = torch.stack([sent, received]).view(2, self._ranks, self.here).tolist()
        away, arriving = [sum(rank) for rank in going], [sum(rank) for rank in coming]
        rows = _exchange(rows, arriving, away, self._group)
        which = torch.arange(self.here, device=rows.device).repeat(self._ranks)
        which = which.repeat_interleave(received, output_size=sum(arriving))
        self.sent = [count for rank in going for count in rank]
        counts = [sum(of_expert) for of_expert in zip(*coming, strict=True)]
        return _exchange(compute(rows, which, counts), away, arriving, self._group)

    def _note(self, sent: Tensor) -> None:
        # What backward recomputes is not counted again.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._counts = sent.clone() if self._counts is None else self._counts.add_(sent)

    def _taken(self, rows: Tensor) -> Tensor:
        """This rank's share of rows that it has alike with others; gradients come from all of them."""
        if self._alike.size == 1:
            return rows
        taken: Tensor = _Taken.apply(rows, self._alike)  # type: ignore[no-untyped-call]
        return taken

    def _joined(self, rows: Tensor, count: int) -> Tensor:
        """All rows that a group of ranks with the same tokens shares, put together from the ranks' parts."""
        if self._alike.size == 1:
            return rows
        joined: Tensor = _Joined.apply(rows, count, self._alike)  # type: ignore[no-untyped-call]
        return joined


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    exchanged: Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Rows go to the ranks of a group, some to each; gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        received, sent = ctx.sizes
        return _exchange(gradients[0], sent, received, ctx.group), None, None, None


class _Taken(torch.autograd.Function):
    """A rank's share of rows; the ranks gather the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, alike: Ranks) -> Tensor:
        ctx.count, ctx.alike = rows.shape[0], alike
        return _share(rows, alike).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], ctx.count, ctx.alike), None


class _Joined(torch.autograd.Function):
    """The rows of all ranks; each takes its share of the gradient, which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, alike: Ranks) -> Tensor:
        ctx.alike = alike
        return _gathered(rows, count, alike)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _share(gradients[0], ctx.alike), None, None


def _share(rows: Tensor, alike: Ranks) -> Tensor:
    size = -(-rows.shape[0] // alike.size)
    return rows[alike.index * size : (alike.index + 1) * size]


def _gathered(share: Tensor, count: int, alike: Ranks) -> Tensor:
    """All `count` rows, of which each rank has its share. Collective."""
    size = -(-count // alike.size)
    sent = share.new_zeros((size, *share.shape[1:]))
    sent[: share.shape[0]] = share
    gathered = share.new_empty((alike.size * size, *share.shape[1:]))
    all_gather_single(gathered, sent, group=alike.group)
    # A copy, because FSDP warns of modules that return views.
    return gathered if gathered.shape[0] == count else gathered[:count].clone()
