"""A head whose weight is divided over the vocabulary among ranks (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_ckpt.parts import is_sharded
from accel_train.errors import LossError

__all__ = ["VocabularyShard", "local_head"]


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose logits this rank computes.

    Attributes:
        group: the process group of the ranks that divide the vocabulary.
        start: the first token of this rank.
        total: tokens of the whole vocabulary.
    """

    group: Any
    start: int
    total: int

    def maximum(self, values: Tensor) -> Tensor:
        """The largest values of any rank, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sums over ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values


def local_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabularyShard | None]:
    """This rank's parts of a head, and which tokens of the vocabulary they are; None: all.

    Args:
        hidden: hidden states (…, H), the same on all ranks that divide the vocabulary.
        weight: (V, H), whole or a `DTensor` that is divided along dimension 0.
        bias: (V,), divided as the weight is.

    Raises:
        LossError: the tensors are divided in another way.
    """
    if not is_sharded(weight):
        if is_sharded(hidden) or (bias is not None and is_sharded(bias)):
            raise LossError(
                "The weight of the head is a whole tensor, and the hidden states or the bias are DTensors. Pass "
                "`hidden.full_tensor()`, or divide the weight, too (ColwiseParallel)."
            )
        return hidden, weight, bias, None
    from torch.distributed.tensor import Replicate, Shard

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    placements = weight.placements  # type: ignore[attr-defined]
    if len(placements) != 1 or placements[0] not in (Shard(0), Replicate()):
        raise LossError(
            f"The weight of the head has the placements {placements}, expected (Shard(dim=0),): one mesh dimension "
            "that divides the vocabulary, as ColwiseParallel does."
        )
    if is_sharded(hidden):
        if hidden.device_mesh != mesh or hidden.placements != (Replicate(),):  # type: ignore[attr-defined]
            raise LossError(
                f"The hidden states have the placements {hidden.placements}, expected Replicate on the mesh of the "  # type: ignore[attr-defined]
                "weight: every rank computes the logits of its part of the vocabulary for all tokens. Call "
                "`hidden.redistribute(mesh, [Replicate()])`."
            )
        hidden = hidden.to_local()  # type: ignore[attr-defined]
    elif placements[0] == Shard(0) and mesh.mesh_dim_names != ("tp",):
        raise LossError(
            f"The weight of the head is divided among {mesh.size()} ranks (mesh dimension {mesh.mesh_dim_names}). If "
            "fully_shard divides it, call the loss inside the model's forward, where the weight is whole. If these "
            "ranks have the same hidden states, pass them as `DTensor.from_local(hidden, mesh, [Replicate()])`."
        )
    if bias is not None:
        if not is_sharded(bias) or bias.placements != placements:  # type: ignore[attr-defined]
            raise LossError(
                f"The weight of the head is a DTensor with the placements {placements}, and its bias is divided in "
                "another way. Divide both (ColwiseParallel does)."
            )
        bias = bias.to_local()  # type: ignore[attr-defined]
    local: Tensor = weight.to_local()  # type: ignore[attr-defined]
    if placements[0] == Replicate() or mesh.size() == 1:
        return hidden, local, bias, None
    total = weight.shape[0]
    # As torch divides: equal parts, rounded up, from the first rank on.
    start = min(-(-total // mesh.size()) * mesh.get_local_rank(), total)
    return hidden, local, bias, VocabularyShard(mesh.get_group(), start, total)
