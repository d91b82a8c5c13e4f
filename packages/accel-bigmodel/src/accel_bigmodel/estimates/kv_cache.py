"""How much memory the keys and values of earlier tokens take, from a transformers configuration."""

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
"""Kinds of layers that forget, and the name of what says after how many tokens."""
_WITHOUT_CACHE = ("moe", "mlp")


def estimate_kv_cache(
    config: Any,
    batch_size: int,
    sequence_length: int,
    *,
    dtype: torch.dtype | str | None = None,
    encoder_sequence_length: int | None = None,
) -> int:
    """Bytes of the cache of keys and values while a model generates.

    Sum over layers of ``2 x batch x heads of keys and values x tokens x head size x bytes per number``. A layer with a
    sliding window keeps at most as many tokens as the window has, and one that uses another layer's keys and values
    keeps none. A decoder that looks at an encoder also keeps the keys and values of the encoder's tokens. Latent
    attention keeps ``kv_lora_rank + qk_rope_head_dim`` numbers of a token in each layer, as in transformers 5; version
    4 kept what they decompress to.

    Args:
        config: the configuration of a transformers model.
        batch_size: number of sequences; beams count as sequences.
        sequence_length: tokens of each, prompt and answer together; for encoder-decoders, the decoder's.
        dtype: of the cache, which is that of the activations; None: the configuration's, else float32.
        encoder_sequence_length: tokens (or frames) that the encoder gives; None: ``sequence_length``.

    Raises:
        EstimateError: the configuration does not say what is needed, or has layers of another kind; there is no such
            dtype; a number is negative, or not whole.
    """
    counts = {"batch_size": batch_size, "sequence_length": sequence_length}
    if encoder_sequence_length is not None:
        counts["encoder_sequence_length"] = encoder_sequence_length
    check_counts(**counts)
    try:
        dtype_of_cache = parse_dtype(dtype or getattr(config, "dtype", None) or torch.float32)
    except ValueError as error:
        raise EstimateError(f"the dtype of the cache: {error}") from None
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
    """Refuse what is no number of things.

    Raises:
        EstimateError: one is negative, or not whole.
    """
    if wrong := [
        f"{name} is {count!r}"
        for name, count in counts.items()
        if not isinstance(count, Integral) or count < 0
    ]:
        raise EstimateError(f"{', '.join(wrong)}; give whole numbers that are not negative")


def _config_of_text(config: Any) -> Any:
    """The part of a configuration that speaks of the decoder of text."""
    if not hasattr(config, "get_text_config"):
        return config
    if hasattr(config, "decoder_layers") and not getattr(config, "is_encoder_decoder", False):
        # A decoder without its encoder: transformers tells their numbers apart only where it sees both.
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True
    return config.get_text_config(decoder=True)


def _layers_with_cache(config: Any) -> Iterator[tuple[Any, str]]:
    """For each layer that keeps keys and values, the configuration that holds for it and its kind."""
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
    # A configuration that was cut short by hand still lists the kinds of all layers.
    for layer, kind, mode in zip(layers, kinds, modes, strict=False):
        if kind not in ("full_attention", *_WINDOWS, *_WITHOUT_CACHE):
            raise EstimateError(
                f"{type(config).__name__} has layers of the kind {kind!r}, whose state is no cache of keys and values; "
                f"known are full_attention, {', '.join(_WINDOWS)}"
            )
        if kind not in _WITHOUT_CACHE and mode != "reuse":
            yield layer, kind


def _kind_by_window(config: Any) -> str:
    return next((kind for kind, name in _WINDOWS.items() if getattr(config, name, None)), "full_attention")


def _window(config: Any, kind: str, unlimited: int) -> int:
    """How many tokens a layer keeps at most."""
    if kind not in _WINDOWS:
        return unlimited
    return _first(config, (_WINDOWS[kind],), f"how many tokens a {kind} layer keeps")


def _heads(config: Any) -> int:
    return _first(config, ("num_attention_heads", "decoder_attention_heads"), "the number of attention heads")


def _kv_heads(config: Any) -> int:
    # Falcon's word for a single head. Its later architecture has it, too, and repeats the heads that it caches.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    found = getattr(config, "num_key_value_heads", None)
    return _heads(config) if found is None else int(found)


def _numbers_per_token(config: Any) -> int:
    """How many numbers one layer keeps of a token."""
    if getattr(config, "kv_lora_rank", None):
        # What all heads decompress, and one rotary key.
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
        f"{type(config).__name__} does not say {what} (looked for {', '.join(names)}); estimate_kv_cache takes the "
        "configuration of a transformers model that generates text"
    )
