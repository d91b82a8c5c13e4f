"""A differentiable gather, for losses over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel_state.operations.collectives import gather, reduce
from accel_state.trees import flatten, recursively_apply
from accel_state.world.process import PartialState

__all__ = ["gather_with_grad"]


def gather_with_grad(tensor: Any, *, group: dist.ProcessGroup | None = None, ragged: bool = False) -> Any:
    """Gather as ``gather`` does, with gradients that flow back to the tensors of every rank.

    For a loss that compares samples with those of other ranks, such as a contrastive loss. The gradient of a tensor is
    the sum, over all ranks, of the gradients with respect to its rows. With an engine that averages gradients over
    ranks (DDP, FSDP2) that is the gradient of one big batch, exactly, in both usual forms: every rank computes the loss
    of all samples, or the mean loss of its own samples against all.

    The backward pass is a collective: all ranks must use the result in the loss that they call ``backward`` on.

    Args:
        tensor: a tree of tensors, of equal structure on all ranks; 0-dimensional tensors count as one element. Those
            that require no gradient, such as labels, are gathered as they are.
        group: the participating ranks; None: all.
        ragged: allow first dimensions that differ between ranks.

    Returns:
        a tree of the same types, with tensors of shape (sum of first dimensions, ...), on every rank; in a world of
        one, ``tensor`` itself.

    Raises:
        TypeError: a leaf that is not a dense tensor.
        CollectiveMismatchError: structures, dtypes, shapes or ``requires_grad`` differ between ranks.
    """
    channel = PartialState().channel(group)
    if channel is None:
        return tensor
    try:
        leaves, _ = flatten(tensor, only_tensors=True)
    except TypeError:
        leaves = []
    dense = leaves and all(leaf.layout is torch.strided and not leaf.is_nested for leaf in leaves)
    if not (dense and torch.is_grad_enabled()):
        return gather(tensor, group=group, ragged=ragged)  # which refuses, on all ranks, what is not dense
    results = iter(_Gather.apply(group, ragged, channel.rank, *leaves))  # type: ignore[no-untyped-call]
    return recursively_apply(lambda _: next(results), tensor)


class _Gather(torch.autograd.Function):
    """One node for all tensors, so that every rank runs one collective in backward, whichever of them it used."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, ragged: bool, rank: int, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        rows = [1 if leaf.dim() == 0 else leaf.shape[0] for leaf in leaves]
        if ragged:
            counts = gather(torch.tensor([rows]), group=group)
            ctx.starts = counts[:rank].sum(dim=0).tolist()
        else:
            ctx.starts = [rank * count for count in rows]
        ctx.group, ctx.rows, ctx.shapes = group, rows, [leaf.shape for leaf in leaves]
        # The name tells ranks that differ in it apart: backward would wait for ranks that do not take part.
        flags = f"requires_grad={[leaf.requires_grad for leaf in leaves]}"
        gathered: list[Tensor] = gather({flags: list(leaves)}, group=group, ragged=ragged)[flags]
        pairs = zip(gathered, leaves, strict=True)
        ctx.mark_non_differentiable(*(result for result, leaf in pairs if not leaf.requires_grad))
        ctx.needs = [leaf.requires_grad for leaf in leaves]
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = [gradient for gradient, needed in zip(gradients, ctx.needs, strict=True) if needed]
        summed = iter(reduce(wanted, "sum", group=ctx.group))
        found = [
            next(summed)[start : start + count].reshape(shape) if needed else None
            for needed, start, count, shape in zip(ctx.needs, ctx.starts, ctx.rows, ctx.shapes, strict=True)
        ]
        return (None, None, None, *found)
