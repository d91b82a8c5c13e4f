"""A device map that does not fit the device: where each module of a model with tied weights is between forwards."""

from __future__ import annotations

from typing import Any

from accel_bigmodel import compute_module_sizes, infer_auto_device_map, init_empty_weights

BUDGET = {0: 15_000_000, "cpu": 11_000_000}


def record() -> dict[str, Any]:
    """Bytes and place of each module, and the memory that the map was made for."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=256, num_hidden_layers=7, intermediate_size=768, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    model.tie_weights()
    device_map = infer_auto_device_map(
        model, max_memory=BUDGET, no_split_module_classes=["LlamaDecoderLayer"]
    )
    sizes = compute_module_sizes(model)
    return {
        "budget": {str(place): size for place, size in BUDGET.items()},
        "map": {name: str(place) for name, place in device_map.items()},
        "bytes": {name: sizes[name] for name in device_map},
    }
