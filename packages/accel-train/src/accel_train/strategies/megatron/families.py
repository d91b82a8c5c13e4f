"""Model families of transformers that Megatron-core can train: its options for each, and the mapping of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from accel_train.errors import OptionError
from accel_train.strategies.megatron.layout import (
    FusedHeads,
    Gated,
    Heads,
    Rule,
    Vocabulary,
    WholeTensor,
)

__all__ = ["FAMILIES", "Architecture", "add_model_config_to_megatron_parser", "architecture_of"]


@dataclass(frozen=True)
class Architecture:
    """A model as Megatron-core builds it: arguments of its classes, and a rule for each tensor.

    Attributes:
        transformer: arguments of Megatron's `TransformerConfig`.
        gpt: arguments of its `GPTModel`.
        vocabulary: entries of the vocabulary.
        top: the rule of each tensor outside of layers, by Megatron's name.
        layer: the rule of each tensor of a layer, from the layer's number in the whole model, by Megatron's name
            within the layer.
        tied: names of the tied tensors, the embedding's and the output layer's; None: they are not tied.
        eod_token: the token at the end of a document.
    """

    transformer: Mapping[str, Any]
    gpt: Mapping[str, Any]
    vocabulary: int
    top: Mapping[str, Rule]
    layer: Callable[[int], Mapping[str, Rule]]
    tied: tuple[str, str] | None
    eod_token: int | None

    @property
    def heads(self) -> tuple[int, int, int]:
        """The number of key and value heads, of query heads for each of them, and the size of a head."""
        options = self.transformer
        groups: int = options["num_query_groups"]
        return groups, options["num_attention_heads"] // groups, options["kv_channels"]


_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def architecture_of(config: Any) -> Architecture:
    """Translate a transformers configuration to Megatron-core's options.

    Args:
        config: the transformers configuration of the model.

    Raises:
        OptionError: the model is of another family, or has an option that Megatron-core's layers do not have.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        described = f"a transformers model of type {kind!r}" if kind else "no model of transformers"
        raise OptionError(
            f"The model is {described}, and Megatron-core's layers are built for: {', '.join(FAMILIES)}. Pass "
            "MegatronLMPlugin(custom_model_provider_function=…), which builds the model from megatron.core itself, or "
            "use another strategy, such as FullyShardedDataParallelPlugin."
        )
    return FAMILIES[kind](config)


def _activation(config: Any, name: str) -> Callable[..., torch.Tensor]:
    if name not in _ACTIVATIONS:
        raise OptionError(
            f"The model's activation is {name!r}; for Megatron-core's layers known: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _refuse(config: Any, name: str, value: object, wanted: str) -> None:
    raise OptionError(
        f"The model's configuration has {name}={value!r}, which Megatron-core's layers do not have here; expected "
        f"{wanted}. Use another strategy for this model, or MegatronLMPlugin(custom_model_provider_function=…)."
    )


def _rope(config: Any) -> dict[str, Any]:
    """The arguments of rotary embeddings; transformers 5 has them in one mapping, 4 in two places."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = found.get("rope_type", found.get("type", "default"))
    base = found.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(config, "partial_rotary_factor", found["partial_rotary_factor"], "1.0")
    if kind == "default":
        return {"rotary_base": base}
    # What Megatron has in RotaryEmbedding._apply_scaling; other numbers cannot be given.
    fixed = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if kind != "llama3" or any(found.get(name) != value for name, value in fixed.items()):
        _refuse(config, "rope_parameters", found, f"rope_type 'default', or 'llama3' with {fixed}")
    return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": found["factor"]}


def _decoder(config: Any) -> Architecture:
    """Llama, and those that are built alike."""
    kind = config.model_type
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    if attention_bias != mlp_bias:
        _refuse(config, "attention_bias", attention_bias, f"the value of mlp_bias, {mlp_bias}")
    uses_window = getattr(config, "use_sliding_window", kind == "mistral")
    if uses_window and getattr(config, "sliding_window", None) is not None:
        _refuse(config, "sliding_window", config.sliding_window, "None")
    tied = bool(config.tie_word_embeddings)
    qk_norm, qkv_bias = kind == "qwen3", kind == "qwen2"
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(config, config.hidden_act),
        "add_bias_linear": mlp_bias,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "attention_dropout": float(getattr(config, "attention_dropout", 0.0) or 0.0),
        "hidden_dropout": 0.0,
    }
    gpt = {
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": tied,
        **_rope(config),
    }
    top: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": WholeTensor("model.norm.weight"),
        "output_layer.weight": Vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight"),
    }

    def layer(number: int) -> Mapping[str, Rule]:
        at = f"model.layers.{number}"
        queries, keys, values = (f"{at}.self_attn.{name}_proj" for name in "qkv")
        rules: dict[str, Rule] = {
            "input_layernorm.weight": WholeTensor(f"{at}.input_layernorm.weight"),
            "pre_mlp_layernorm.weight": WholeTensor(f"{at}.post_attention_layernorm.weight"),
            "self_attention.q_layernorm.weight": WholeTensor(f"{at}.self_attn.q_norm.weight"),
            "self_attention.k_layernorm.weight": WholeTensor(f"{at}.self_attn.k_norm.weight"),
            "self_attention.linear_proj.weight": WholeTensor(f"{at}.self_attn.o_proj.weight", dim=1),
            "self_attention.linear_proj.bias": WholeTensor(f"{at}.self_attn.o_proj.bias"),
            "mlp.linear_fc2.weight": WholeTensor(f"{at}.mlp.down_proj.weight", dim=1),
            "mlp.linear_fc2.bias": WholeTensor(f"{at}.mlp.down_proj.bias"),
        }
        for what in ("weight", "bias"):
            rules[f"self_attention.linear_qkv.{what}"] = Heads(
                (f"{queries}.{what}", f"{keys}.{what}", f"{values}.{what}")
            )
            rules[f"mlp.linear_fc1.{what}"] = Gated(
                (f"{at}.mlp.gate_proj.{what}", f"{at}.mlp.up_proj.{what}")
            )
        return rules

    both = ("model.embed_tokens.weight", "lm_head.weight") if tied else None
    return Architecture(transformer, gpt, config.vocab_size, top, layer, both, _first(config.eos_token_id))


def _gpt2(config: Any) -> Architecture:
    heads = config.num_attention_heads
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if getattr(config, name, False):
            _refuse(config, name, True, "False")
    if not getattr(config, "scale_attn_weights", True):
        _refuse(config, "scale_attn_weights", False, "True")
    if not config.tie_word_embeddings:
        _refuse(config, "tie_word_embeddings", False, "True")
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.n_inner or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": config.hidden_size // heads,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "gated_linear_unit": False,
        "activation_func": _activation(config, config.activation_function),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "attention_dropout": float(config.attn_pdrop),
        "hidden_dropout": float(config.resid_pdrop),
        "embedding_dropout": float(config.embd_pdrop),
    }
    gpt = {
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }
    embedding = "transformer.wte.weight"
    top: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Vocabulary(embedding),
        "embedding.position_embeddings.weight": WholeTensor("transformer.wpe.weight"),
        "decoder.final_layernorm.weight": WholeTensor("transformer.ln_f.weight"),
        "decoder.final_layernorm.bias": WholeTensor("transformer.ln_f.bias"),
        "output_layer.weight": Vocabulary(embedding),
    }

    def layer(number: int) -> Mapping[str, Rule]:
        at = f"transformer.h.{number}"
        rules: dict[str, Rule] = {
            "self_attention.linear_qkv.weight": FusedHeads(f"{at}.attn.c_attn.weight", transposed=True),
            "self_attention.linear_qkv.bias": FusedHeads(f"{at}.attn.c_attn.bias"),
            "self_attention.linear_proj.weight": WholeTensor(
                f"{at}.attn.c_proj.weight", dim=1, transposed=True
            ),
            "self_attention.linear_proj.bias": WholeTensor(f"{at}.attn.c_proj.bias"),
            "mlp.linear_fc1.weight": WholeTensor(f"{at}.mlp.c_fc.weight", dim=0, transposed=True),
            "mlp.linear_fc1.bias": WholeTensor(f"{at}.mlp.c_fc.bias", dim=0),
            "mlp.linear_fc2.weight": WholeTensor(f"{at}.mlp.c_proj.weight", dim=1, transposed=True),
            "mlp.linear_fc2.bias": WholeTensor(f"{at}.mlp.c_proj.bias"),
        }
        for what in ("weight", "bias"):
            rules[f"input_layernorm.{what}"] = WholeTensor(f"{at}.ln_1.{what}")
            rules[f"pre_mlp_layernorm.{what}"] = WholeTensor(f"{at}.ln_2.{what}")
        return rules

    both = (embedding, "lm_head.weight")
    return Architecture(transformer, gpt, config.vocab_size, top, layer, both, _first(config.eos_token_id))


def _first(token: Any) -> int | None:
    """A configuration may list several tokens that end a text; the first ends documents in training."""
    if isinstance(token, list | tuple):
        return int(token[0]) if token else None
    return None if token is None else int(token)


FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    "gpt2": _gpt2,
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
}
"""Functions that translate a configuration, by its `model_type`."""


def add_model_config_to_megatron_parser(
    model_type: str,
) -> Callable[[Callable[[Any], Architecture]], Callable[[Any], Architecture]]:
    """Decorator that adds a model family: its function turns a transformers configuration into an `Architecture`.

    Args:
        model_type: the `model_type` of the configuration.
    """

    def add(function: Callable[[Any], Architecture]) -> Callable[[Any], Architecture]:
        FAMILIES[model_type] = function
        return function

    return add
