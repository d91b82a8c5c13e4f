"""The KV cache by hand, from configurations without transformers; real models are compared in tests-integration."""

from types import SimpleNamespace

import pytest
import torch

from accel_bigmodel import EstimateError, estimate_kv_cache

BASE = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}


def config(**changes):
    return SimpleNamespace(**{**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, 3 * 2 * 64 * 10),
        ({"num_key_value_heads": 2}, 3 * 2 * 32 * 10),
        ({"head_dim": 8}, 3 * 2 * 4 * 8 * 10),
        ({"multi_query": True}, 3 * 2 * 16 * 10),
        ({"multi_query": True, "new_decoder_architecture": True}, 3 * 2 * 64 * 10),
        ({"sliding_window": 4}, 3 * 2 * 64 * 4),
        ({"sliding_window": 40}, 3 * 2 * 64 * 10),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            2 * 64 * (10 + 4 + 10),
        ),
        ({"layer_types": ["full_attention", "mlp", "moe"]}, 2 * 64 * 10),
        ({"kv_sharing_modes": [None, None, "reuse"]}, 2 * 2 * 64 * 10),
        ({"kv_lora_rank": 5, "qk_rope_head_dim": 3}, 3 * 8 * 10),
    ],
)
def test_numbers_by_hand(changes, numbers):
    assert estimate_kv_cache(config(**changes), 2, 10) == 2 * numbers * 4
    assert estimate_kv_cache(config(**changes), 2, 10, dtype=torch.bfloat16) == 2 * numbers * 2
    assert estimate_kv_cache(config(**changes, dtype=torch.float16), 2, 10) == 2 * numbers * 2


def test_an_encoder_decoder_also_keeps_the_encoders_tokens():
    both = config(is_encoder_decoder=True)
    assert estimate_kv_cache(both, 1, 10) == 2 * estimate_kv_cache(config(), 1, 10)
    assert estimate_kv_cache(both, 1, 10, encoder_sequence_length=30) == 4 * estimate_kv_cache(
        config(), 1, 10
    )


@pytest.mark.parametrize(
    ("make", "counts", "message"),
    [
        (config, (-1, 2), "batch_size is -1; give whole numbers"),
        (config, (1, 2.5), "sequence_length is 2.5"),
        (lambda: config(num_hidden_layers=None), (1, 2), "does not have the number of layers"),
        (lambda: config(layer_types=["mamba"] * 3), (1, 2), "has layers of type 'mamba'"),
        (lambda: config(dtype="float99"), (1, 2), "dtype of the KV cache"),
        (
            lambda: config(layer_types=["sliding_attention"] * 3),
            (1, 2),
            "how many tokens a sliding_attention layer keeps",
        ),
    ],
)
def test_what_cannot_be_estimated(make, counts, message):
    with pytest.raises(EstimateError, match=message):
        estimate_kv_cache(make(), *counts)
