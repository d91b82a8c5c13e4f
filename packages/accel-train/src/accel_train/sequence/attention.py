"""Attention over sequences that are divided among ranks, in place of `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from accel_state.operations.collectives import reduce
from accel_train.errors import IncompatibleOptionsError
from accel_train.sequence.exchange import (
    HEADS,
    SEQUENCE,
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from accel_train.sequence.layout import WHOLE, SequenceLayout
from accel_train.sequence.ring import ring_attention

__all__ = ["DividedAttention"]


@dataclass(frozen=True)
class DividedAttention:
    """Attention from this rank's positions to those of all ranks.

    Ulysses (sequence parallelism; Jacobs et al. 2023, arXiv 2309.14509) exchanges heads for positions before and after.
    Context parallelism gathers keys and values, or passes them around. With both, Ulysses comes first: its groups hold
    neighbouring parts of the sequence.

    Attributes:
        sp_group: ranks that exchange heads; None: no sequence parallelism.
        cp_group: ranks that exchange keys and values; None: no context parallelism.
        rotation: "allgather": every rank holds all keys and values of a layer while it computes; "alltoall": those of
            two ranks at a time.
        layout: which positions each rank of `cp_group` has.
    """

    sp_group: Any = None
    cp_group: Any = None
    rotation: str = "allgather"
    layout: SequenceLayout = WHOLE

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Compute `torch.nn.functional.scaled_dot_product_attention` for this rank's positions.

        `documents` is the number of the document of each position of all ranks, (samples or 1, positions). Positions
        attend to those of their document; None: to all.

        Raises:
            IncompatibleOptionsError: there is a mask, which covers only this rank's positions; query and key have
                different lengths; the number of heads cannot be divided among the ranks; or dropout under "alltoall",
                or documents there or without `is_causal`.
        """
        self._check(query, key, attn_mask, dropout_p)
        if documents is not None:
            self._check_documents(is_causal)
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        if self.sp_group is None:
            return self._attend(query, key, value, dropout_p, is_causal, scale, enable_gqa, documents)
        ranks = dist.get_world_size(self.sp_group)
        key, value = (_repeated(tensor, query.shape[HEADS], ranks) for tensor in (key, value))
        query, key, value = (sequence_to_heads(tensor, self.sp_group) for tensor in (query, key, value))
        output = self._attend(query, key, value, dropout_p, is_causal, scale, enable_gqa, documents)
        return heads_to_sequence(output, self.sp_group)

    def _check(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float) -> None:
        if attn_mask is not None:
            raise IncompatibleOptionsError(
                f"Attention was called with a mask of shape {tuple(attn_mask.shape)}, which covers only the "
                f"{query.shape[SEQUENCE]} positions of this rank; with a divided sequence it must cover those of all "
                "ranks. Pass is_causal=True or no mask: pad sequences on the right, leave `attention_mask` out of the "
                "batch, and use models without a sliding window."
            )
        if query.dim() != 4 or query.shape[SEQUENCE] != key.shape[SEQUENCE]:
            raise IncompatibleOptionsError(
                f"Attention was called with a query of shape {tuple(query.shape)} and a key of shape "
                f"{tuple(key.shape)}; with a divided sequence both must have the shape (batch, heads, positions, "
                "features) and the same number of positions. Cross-attention and caches of keys are not divided: "
                "train without them."
            )
        if dropout_p and self.cp_group is not None and self.rotation == "alltoall":
            raise IncompatibleOptionsError(
                f"Attention was called with dropout {dropout_p}, which cp_comm_strategy 'alltoall' does not support. "
                "Use 'allgather', or set the model's attention dropout to 0."
            )
        if self.sp_group is not None and query.shape[HEADS] % dist.get_world_size(self.sp_group):
            ranks = dist.get_world_size(self.sp_group)
            raise IncompatibleOptionsError(
                f"sp_size {ranks} does not divide the {query.shape[HEADS]} attention heads, but sequence parallelism "
                "gives each rank the same number. Choose an sp_size that does, or context parallelism (cp_size)."
            )

    def _check_documents(self, is_causal: bool) -> None:
        told = "position_ids begin again inside a sequence, so it holds several documents, which "
        if not is_causal:
            raise IncompatibleOptionsError(
                f"{told}only causal attention keeps apart; this attention is not causal. Give each document a sequence "
                "of its own, or let position_ids go on."
            )
        if self.cp_group is not None and self.rotation == "alltoall":
            raise IncompatibleOptionsError(
                f"{told}cp_comm_strategy 'alltoall' does not keep apart. Use 'allgather', or sp_size."
            )

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor of (samples, this rank's positions) to one of all positions, in their order."""
        found = tensor[:, None, :, None]
        for group in (self.sp_group, self.cp_group):
            if group is not None:
                found = gather_sequence(found, group)
        return self.layout.restore(found, SEQUENCE)[:, 0, :, 0]

    def sum(self, number: Tensor) -> Tensor:
        """Sum a number over the ranks that have parts of the same sequences."""
        for group in (self.sp_group, self.cp_group):
            if group is not None:
                number = reduce(number, "sum", group=group)
        return number

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float,
        enable_gqa: bool,
        documents: Tensor | None,
    ) -> Tensor:
        group, heads = self.cp_group, query.shape[HEADS]
        if group is None and documents is None:
            return scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if group is not None and self.rotation == "alltoall":
            key, value = (_repeated(tensor, heads, heads) for tensor in (key, value))
            return ring_attention(
                query,
                key,
                value,
                group,
                is_causal=is_causal,
                scale=scale,
                balanced=self.layout.balanced,
            )
        if group is not None:
            key, value = gather_sequence(key, group), gather_sequence(value, group)
        if not is_causal:
            return scaled_dot_product_attention(
                query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
            )
        key, value = (self.layout.restore(tensor, SEQUENCE) for tensor in (key, value))
        if documents is not None:  # few kernels take a mask and heads that share keys
            key, value = (_repeated(tensor, heads, heads) for tensor in (key, value))
            enable_gqa = False
        pieces = self.layout.pieces(0 if group is None else dist.get_rank(group))
        length = query.shape[SEQUENCE] // len(pieces)
        outputs = []
        for number, queries in zip(pieces, torch.split(query, length, SEQUENCE), strict=True):
            known = (number + 1) * length  # no position of this piece attends to later ones
            outputs.append(
                scaled_dot_product_attention(
                    queries,
                    key[:, :, :known],
                    value[:, :, :known],
                    attn_mask=_mask(length, known, documents, query.device),
                    dropout_p=dropout_p,
                    scale=scale,
                    enable_gqa=enable_gqa,
                )
            )
        return torch.cat(outputs, SEQUENCE)


def _mask(length: int, known: int, documents: Tensor | None, device: torch.device) -> Any:
    """What the last of the known positions attend to: themselves and earlier ones, of their document."""
    if documents is None and device.type != "cpu":
        return causal_lower_right(
            length, known
        )  # kernels of accelerators know it; the CPU's make a mask of it
    mask = torch.ones(length, known, dtype=torch.bool, device=device).tril(known - length)
    if documents is None:
        return mask
    asking, asked = documents[:, known - length : known], documents[:, :known]
    return (mask & (asking[:, :, None] == asked[:, None, :]))[:, None]


def _repeated(tensor: Tensor, heads: int, ranks: int) -> Tensor:
    """Keys or values, with heads repeated in place until their number divides among the ranks."""
    own = tensor.shape[HEADS]
    if own % ranks == 0:
        return tensor
    times = ranks // own if ranks % own == 0 else heads // own
    return tensor.repeat_interleave(times, HEADS)
