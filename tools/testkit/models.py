"""Architectures of transformers, tiny and with random weights, and inputs for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 48
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}


@dataclass(frozen=True)
class Architecture:
    """One entry of the zoo.

    Attributes:
        model: name of the class in transformers.
        config: name of the configuration's class.
        settings: the configuration.
        inputs: makes the inputs of a forward.
        prompt: makes the inputs of ``generate()``; None where there is no such thing.
        tied: a pair of names that are one parameter; None without ties.
    """

    model: str
    config: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    prompt: Callable[[], dict[str, torch.Tensor]] | None = None
    tied: tuple[str, str] | None = None
    save_options: dict[str, Any] = field(default_factory=dict)

    def configuration(self) -> Any:
        """A new configuration."""
        import transformers

        return getattr(transformers, self.config)(**self.settings)

    def build(self) -> nn.Module:
        """The model in evaluation mode; always with the same weights, where there are any to initialise."""
        import transformers

        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(self.configuration()).eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():  # biases and norms, too, so that each one matters
            if not parameter.is_meta:
                parameter.data.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        return model


def _ids(rows: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def _text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


def _text_to_text() -> dict[str, torch.Tensor]:
    return _text() | {"decoder_input_ids": _ids(length=3, seed=1)}


def _image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))}


ZOO = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", {**_TOKENS, **_DECODER}, _text, _text),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_TOKENS, "n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 4},
        _text,
        _text,
        tied=("transformer.wte.weight", "lm_head.weight"),
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_TOKENS,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 2,
            "tie_word_embeddings": True,
        },
        _text_to_text,
        _text,
        tied=("shared.weight", "lm_head.weight"),
    ),
    "bert": Architecture(
        "BertForSequenceClassification", "BertConfig", {"vocab_size": VOCABULARY, **_ENCODER}, _text
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4},
        _image,
        save_options={"save_original_format": False},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_TOKENS, **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        _text,
        _text,
        # The names of the published checkpoints are not those of the modules: the experts are fused.
        save_options={"save_original_format": False},
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_TOKENS,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 32,
            "decoder_start_token_id": 2,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda: _sound() | {"decoder_input_ids": _ids(length=3)},
        _sound,
        tied=("model.decoder.embed_tokens.weight", "proj_out.weight"),
    ),
}
