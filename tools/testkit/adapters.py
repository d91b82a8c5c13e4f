"""A small Llama with adapters of PEFT, and its training in plain PyTorch."""

from __future__ import annotations

import torch

__all__ = [
    "adapter",
    "adapters_of",
    "base",
    "close",
    "make",
    "optimizer_of",
    "plain",
    "samples",
    "trained",
]

VOCABULARY = 97


def base(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_hidden_layers=3,
    )
    return LlamaForCausalLM(config).to(dtype)


def adapter(**options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options})


def make(dtype=torch.float32, **options):
    """Its adapters start with values other than zero, so that all of them have gradients from the first step on."""
    from peft import get_peft_model

    return get_peft_model(base(dtype), adapter(init_lora_weights=False, **options))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def samples(begin=0):
    return (torch.arange(80).view(8, 10) * 3 + begin) % VOCABULARY


def plain(model, steps=3, optimizer=None):
    """Losses and norms of plain PyTorch."""
    optimizer = optimizer or optimizer_of(trained(model))
    seen = []
    for step in range(steps):
        loss = model(input_ids=samples(step), labels=samples(step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def adapters_of(model, state=None):
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=state)


def close(found, wanted, bound=1e-6):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=bound, atol=bound, msg=name)
