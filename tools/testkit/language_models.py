"""Small language models of transformers, and three training steps of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["config_of", "ids", "train"]


def config_of(kind: str, layers: int = 2) -> Any:
    """The configuration of a small model: llama, or a mixture of four experts."""
    import transformers

    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_hidden_layers": layers,
        "use_cache": False,
    }
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return {
        "llama": lambda: transformers.LlamaConfig(**small),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=4),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**small, **routed, head_dim=8),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **small, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **small | {"num_key_value_heads": 4},
            **latent,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
    }[kind]()


def ids() -> Tensor:
    """Eight sequences of ten tokens."""
    return (torch.arange(80).view(8, 10) * 3) % 96


def train(accelerator: Any, model: nn.Module) -> tuple[nn.Module, list[tuple[float, float]]]:
    """Losses and norms of three steps; each group of ranks has its rows of the batch.

    Args:
        accelerator: None: one process, in plain PyTorch.
        model: not prepared.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rows = ids()
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        ranks = accelerator.strategy.batch
        rows = rows.chunk(ranks.size)[ranks.index]
    seen = []
    for _ in range(3):
        loss = model(input_ids=rows, labels=rows).loss
        if accelerator is None:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss = accelerator.reduce(loss.detach(), "mean")
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return model, seen
