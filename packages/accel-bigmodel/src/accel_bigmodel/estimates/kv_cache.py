"""Estimates the memory of the KV cache, from a transformers configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from accel_bigmodel.errors import EstimateError
from accel_ckpt.tensor_storage import parse_dtype

__all__ = ["estimate_kv_cache"]

_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types with a limited window, and the configuration attribute with its number of tokens."""
_WITHOUT_CACHE = ("moe", "mlp")


def estimate_kv_cache(
    config: Any,
    batch_size: int,
    sequence_length: int,
    *,
    dtype: torch.dtype | str | None = None,
    encoder_sequence_length: int | None = None,
) -> int:
    """Estimate the bytes of the KV cache while a model generates.

    The sum over layers of ``2 x batch x KV heads x tokens x head size x bytes per number``. A layer with a sliding
    window keeps at most the tokens of the window, and a layer that shares another layer's keys and values keeps none. A
    decoder with cross-attention also keeps the keys and values of the encoder's tokens. Latent attention keeps
    ``kv_lora_rank + qk_rope_head_dim`` numbers per token in each layer, as in transformers 5; version 4 kept the
    decompressed values.

    Args:
        config: the configuration of a transformers model.
        batch_size: number of sequences; beams count as sequences.
        sequence_length: tokens of each sequence, prompt and output together; for encoder-decoder models, tokens of the
            decoder.
        dtype: dtype of the cache, which is that of the activations; None: that of the configuration, otherwise float32.
        encoder_sequence_length: tokens (or frames) in the encoder's output; None: ``sequence_length``.

    Raises:
        EstimateError: the configuration lacks a needed value, or has layers of another type; the dtype is unknown; a
            number is negative, or not whole.
    """
    counts = {"batch_size": batch_size, "sequence_length": sequence_length}
    if encoder_sequence_length is not None:
        counts["encoder_sequence_length"] = encoder_sequence_length
    check_counts(**counts)
    try:
        dtype_of_cache = parse_dtype(dtype or getattr(config, "dtype", None) or torch.float32)
    except ValueError as error:
        raise EstimateError(f"dtype of the KV cache: {error}") from None
    layers = list(_layers_with_cache(_config_of_text(config)))
    numbers = sum(
        _numbers_per_token(layer) * min(sequence_length, _window(layer, kind, sequence_length))
        for layer, kind in layers
    )
    if getattr(config, "is_encoder_decoder", False):
        length = sequence_length if encoder_sequence_length is None else encoder_sequence_length
        numbers += sum(_numbers_per_token(layer) for layer, _ in layers) * length
    return batch_size * numbers * dtype_of_cache.itemsize


def check_counts(**counts: Any) -> None:
    """Refuse counts that are not natural numbers.

    Raises:
        EstimateError: a count is negative, or not whole.
    """
    if wrong := [
        f"{name} is {count!r}"
        for name, count in counts.items()
        if not isinstance(count, Integral) or count < 0
    ]:
        raise EstimateError(f"{', '.join(wrong)}; give whole numbers that are not negative")


def _config_of_text(config: Any) -> Any:
    """The part of a configuration that describes the text decoder."""
    if not hasattr(config, "get_text_config"):
        return config
    if hasattr(config, "decoder_layers") and not getattr(config, "is_encoder_decoder", False):
        # A decoder without its encoder: transformers distinguishes their attributes only if both are there.
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True
    return config.get_text_config(decoder=True)


def _layers_with_cache(config: Any) -> Iterator[tuple[Any, str]]:
    """For each layer with a cache, its configuration and its type."""
    if getattr(config, "is_heterogeneous", False):
        layers = list(config.per_layer_config)
    else:
        layers = [config] * _first(
            config, ("num_decoder_layers", "num_hidden_layers", "decoder_layers"), "the number of layers"
        )
    kinds: Sequence[str] = getattr(config, "layer_types", None) or [
        _kind_by_window(layer) for layer in layers
    ]
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
    # A configuration whose number of layers was reduced by hand still lists the types of all layers.
    for layer, kind, mode in zip(layers, kinds, modes, strict=False):
        if kind not in ("full_attention", *_WINDOWS, *_WITHOUT_CACHE):
            raise EstimateError(
                f"{type(config).__name__} has layers of type {kind!r}, whose state is not a KV cache; supported are "
                f"full_attention, {', '.join(_WINDOWS)}"
            )
        if kind not in _WITHOUT_CACHE and mode != "reuse":
            yield layer, kind


def _kind_by_window(config: Any) -> str:
    return next((kind for kind, name in _WINDOWS.items() if getattr(config, name, None)), "full_attention")


def _window(config: Any, kind: str, unlimited: int) -> int:
    """The most tokens that a layer keeps."""
    if kind not in _WINDOWS:
        return unlimited
    return _first(config, (_WINDOWS[kind],), f"how many tokens a {kind} layer keeps")


def _heads(config: Any) -> int:
    return _first(config, ("num_attention_heads", "decoder_attention_heads"), "the number of attention heads")


def _kv_heads(config: Any) -> int:
    # Falcon's attribute for a single KV head. Its later architecture sets it too, but has more cached heads.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    found = getattr(config, "num_key_value_heads", None)
    return _heads(config) if found is None else int(found)


def _numbers_per_token(config: Any) -> int:
    """Numbers that one layer keeps per token."""
    if getattr(config, "kv_lora_rank", None):
        # The compressed keys and values of all heads, and one rotary key.
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    if size is None:
        size = _first(config, ("hidden_size", "d_model"), "the hidden size") // _heads(config)
    return 2 * _kv_heads(config) * int(size)


def _first(config: Any, names: Sequence[str], what: str) -> int:
    for name in names:
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    raise EstimateError(
        f"{type(config).__name__} does not have {what} (looked for {', '.join(names)}); estimate_kv_cache needs the "
        "configuration of a transformers model that generates text"
    )
