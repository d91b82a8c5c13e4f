"""Attention by PyTorch's fused kernels in Megatron-core's layers, in place of Megatron's own.

Megatron-core takes its fused attention from Transformer Engine; its own computes all scores as one tensor.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from accel_train.errors import ArgumentTypeError, OptionError
from accel_train.strategies.megatron.context import ContextPart

__all__ = ["FusedAttention"]

# Fields of Megatron's configuration that change what attention computes: the only value that the kernels have, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "window_size": (None, "every position attends to all before it"),
    "softmax_type": ("vanilla", "the softmax has no term beside the scores"),
    "qk_clip": (False, "scores are not kept, so their maximum is not known"),
    "log_max_attention_logit": (False, "scores are not kept, so their maximum is not known"),
    "multi_latent_attention": (False, "keys and values have one size"),
    "cp_comm_type": (None, "ranks that divide sequences gather all keys and values"),
    "hierarchical_context_parallel_sizes": (None, "ranks that divide sequences gather all keys and values"),
    "hybrid_context_parallel": (False, "all sequences are divided alike"),
    "attention_softmax_in_fp32": (True, "the kernels compute the softmax in float32 at least"),
}


class FusedAttention(nn.Module):
    """Attention of a layer, by `scaled_dot_product_attention`; goes into layer specifications as `core_attention`.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: number of the layer in the whole model, from 1.
        attn_mask_type: type of the mask for calls without a mask.
        attention_type: "self".
        attention_dropout: None: the value of the configuration.
        softmax_scale: factor of the scores; None: 1 / √(size of a head).
        pg_collection: Megatron's process groups, with `cp`, if ranks divide sequences.
        others: arguments that Megatron passes to other kinds of attention.

    Raises:
        OptionError: the configuration asks for something that the kernels do not compute.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        _check(config)
        self.layer_number = layer_number
        self.dropout: float = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.mask_type = attn_mask_type
        # Under sequence parallelism Megatron's layers run as a whole on the generators that their ranks do not share.
        divided = getattr(config, "context_parallel_size", 1) > 1
        self._context = ContextPart.of(pg_collection.cp) if divided else None
        self._has_own_draws = not config.sequence_parallel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: (positions, samples, heads, features), the heads and the positions of this rank.
            key: the same shape, with the heads of keys; the number of query heads is a multiple of theirs.
            value: like `key`.
            attention_mask: (samples or 1, 1, positions or 1, positions of all ranks), True where a position is not
                attended to; None: as `attn_mask_type` says.
            attn_mask_type: mask type of this call; None: that of the layer.
            attention_bias: None.
            packed_seq_params: None.

        Returns:
            (positions, samples, heads · features)

        Raises:
            ArgumentTypeError: there is a bias, or sequences are packed; only a model of the script's own passes them.
        """
        if attention_bias is not None or packed_seq_params is not None:
            name = "packed_seq_params" if attention_bias is None else "attention_bias"
            raise ArgumentTypeError(
                f"Attention was called with {name}, which PyTorch's fused attention does not take. Pass it as "
                "attention_mask, or build the model with Megatron-core's own attention."
            )
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        causal = (attn_mask_type or self.mask_type).name in ("causal", "padding_causal")
        with self._draws():
            output = self._attend(queries, keys, values, attention_mask, causal)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _draws(self) -> contextlib.AbstractContextManager[None]:
        """Where ranks of tensor parallelism drop differently what they divide."""
        if not self.training or not self.dropout or not self._has_own_draws:
            return contextlib.nullcontext()
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        forked: contextlib.AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return forked

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attention; all tensors are (samples, heads, positions, features)."""
        if self._context is not None:
            key, value = self._context.whole(torch.cat((key, value), 1), 2).chunk(2, 1)
        if mask is not None:
            return self._kernel(query, key, value, attn_mask=attended(mask))
        if self._context is None or not causal:
            return self._kernel(query, key, value, is_causal=causal)
        found = []
        for number, piece in zip(self._context.pieces, query.chunk(2, 2), strict=True):
            length = piece.shape[2]
            known = (number + 1) * length  # no position of this piece attends to later ones
            found.append(self._last(piece, key[:, :, :known], value[:, :, :known]))
        return torch.cat(found, 2)

    def _last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last positions to themselves and to all before them."""
        length, known = query.shape[2], key.shape[2]
        if length == known:
            return self._kernel(query, key, value, is_causal=True)
        # Kernels of accelerators know this pattern; the CPU's make a mask of it anyway.
        bias = (
            torch.ones(length, known, dtype=torch.bool).tril(known - length)
            if query.device.type == "cpu"
            else causal_lower_right(length, known)
        )
        return self._kernel(query, key, value, attn_mask=bias)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """One call of PyTorch's attention."""
        grouped = query.shape[1] != key.shape[1]
        masks = how.get("attn_mask") is not None and not isinstance(how["attn_mask"], CausalBias)
        if grouped and (query.dtype.itemsize > 2 or masks):
            # Only the kernel for 16 bits without a mask has groups; the others would fall back to a tensor of scores.
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
            grouped = False
        dropout = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=self.scale, enable_gqa=grouped, **how
        )


def attended(mask: Tensor) -> Tensor:
    """Convert Megatron's mask, True where a position is not attended to, to PyTorch's, True where it is.

    A position that may attend to nothing, such as padding before a text, attends to everything, and nothing attends to
    it: a softmax over nothing is NaN, and would spoil the gradients of all others.
    """
    kept = mask.logical_not()
    return kept | kept.any(-1, keepdim=True).logical_not()


def _check(config: Any) -> None:
    for name, (wanted, reason) in _FIXED.items():
        found = getattr(config, name, wanted)
        if found != wanted:
            raise OptionError(
                f"Megatron's configuration has {name}={found!r}, and PyTorch's fused attention (attention_backend, "
                f"context_parallel_size) has {wanted!r} alone: {reason}. Leave {name} out, or train with "
                "Megatron-core's own attention."
            )
