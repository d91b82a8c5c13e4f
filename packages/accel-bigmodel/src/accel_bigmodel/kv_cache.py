"""How much memory the keys and values of earlier tokens take, from a transformers configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_bigmodel.errors import EstimateError
from accel_ckpt.tensors import parse_dtype

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
    sliding window keeps at most as many tokens as the window has. A decoder that looks at an encoder also keeps the
    keys and values of the encoder's tokens. Latent attention keeps ``kv_lora_rank + qk_rope_head_dim`` numbers of a
    token in each layer, as in transformers 5; version 4 kept what they decompress to.

    Args:
        config: the configuration of a transformers model.
        batch_size: number of sequences; beams count as sequences.
        sequence_length: tokens of each, prompt and answer together; for encoder-decoders, the decoder's.
        dtype: of the cache, which is that of the activations; None: the configuration's, else float32.
        encoder_sequence_length: tokens (or frames) that the encoder gives; None: ``sequence_length``.

    Raises:
        EstimateError: the configuration does not say what is needed, or has layers of another kind; a number is
            negative.
    """
    if min(batch_size, sequence_length, encoder_sequence_length or 0) < 0:
        raise EstimateError(
            f"batch_size is {batch_size}, sequence_length {sequence_length}, encoder_sequence_length "
            f"{encoder_sequence_length}; give numbers that are not negative"
        )
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    dtype_of_cache = parse_dtype(dtype or getattr(config, "dtype", None) or torch.float32)
    numbers = _numbers_per_token(text)
    tokens = sum(min(sequence_length, window) for window in _windows(text, sequence_length))
    if getattr(config, "is_encoder_decoder", False):
        length = sequence_length if encoder_sequence_length is None else encoder_sequence_length
        tokens += _layers(text) * length
    return batch_size * tokens * numbers * dtype_of_cache.itemsize


def _windows(config: Any, unlimited: int) -> Iterator[int]:
    """For each layer with a cache, how many tokens it keeps at most."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kind = next(
            (kind for kind, name in _WINDOWS.items() if getattr(config, name, None)), "full_attention"
        )
        kinds = [kind] * _layers(config)
    for kind in kinds:
        if kind in _WINDOWS:
            yield int(_first(config, (_WINDOWS[kind],), f"how many tokens a {kind} layer keeps"))
        elif kind == "full_attention":
            yield unlimited
        elif kind not in _WITHOUT_CACHE:
            raise EstimateError(
                f"{type(config).__name__} has layers of the kind {kind!r}, whose state is no cache of keys and values; "
                f"known are full_attention, {', '.join(_WINDOWS)}"
            )


def _layers(config: Any) -> int:
    return _first(
        config, ("num_decoder_layers", "num_hidden_layers", "decoder_layers"), "the number of layers"
    )


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
