"""PyTorch's norms for Megatron-core's layers, also under sequence parallelism.

Megatron-core's own wrapper of PyTorch's norms refuses sequence parallelism, in which each rank normalises a part of the
sequence: the gradients of their weights are then summands, which Megatron sums where a weight says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Norm", "layer_specs"]


class Norm:
    """Makes `torch.nn.RMSNorm` or `torch.nn.LayerNorm`, according to the configuration.

    Args:
        config: Megatron's `TransformerConfig`.
        hidden_size: number of elements that are normalised together.
        eps: added to the divisor.
        others: arguments that Megatron passes to other norms.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        """The norm itself."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def layer_specs(config: Any, core_attention: type[nn.Module] | None = None) -> Any:
    """Make the specifications of this rank's layers: Megatron-core's own modules, with PyTorch's norms.

    Args:
        config: Megatron's `TransformerConfig`.
        core_attention: the attention module; None: Megatron-core's own.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    if core_attention is not None:
        parts.self_attention.submodules.core_attention = core_attention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)
