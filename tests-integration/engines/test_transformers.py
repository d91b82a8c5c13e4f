"""Models that transformers divides by their plans, trained on ranks, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytest.importorskip(
    "accelerate", reason="transformers needs it for its plans; hatch run engines:transformers installs it"
)


def config_of(kind):
    import transformers

    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return {
        "llama": lambda: transformers.LlamaConfig(**small),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=4),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**small, **experts),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **small, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **small,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    }[kind]()


def ids():
    return (torch.arange(80).view(8, 10) * 3) % 96


def train(accelerator, model):
    """Losses and norms of three steps; each group of ranks has its rows of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rows, ranks = ids(), None
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


def divided(folder, sizes):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from accel_train import Accelerator, TorchTensorParallelPlugin

    tp = sizes.get("tp_size", 1)
    chosen = {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=tp)} if tp > 1 else {"strategy": "fsdp2"}
    accelerator = Accelerator(cpu=True, **chosen)
    config = DistributedConfig(**sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    model, seen = train(accelerator, model)
    accelerator.save_model(model, folder / "after")
    return seen, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


TP = {"tp_size": 2}
FSDP = {"fsdp_size": 2}


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes"),
    [
        ("llama", 2, TP),
        ("mixtral", 2, TP),
        ("qwen3_moe", 2, TP),
        ("qwen3_moe", 2, {**TP, "ep_size": 2}),
        ("llama", 2, FSDP),
        ("mixtral", 2, FSDP),
        ("qwen3_moe", 2, {**FSDP, "ep_size": 2}),
        ("mixtral", 2, {**FSDP, "ep_size": 2}),
        ("gpt_oss", 2, {**FSDP, "ep_size": 2}),
        ("deepseek_v3", 2, {**FSDP, "ep_size": 2}),
        pytest.param("llama", 4, {**TP, **FSDP}, marks=pytest.mark.full),
        pytest.param("mixtral", 4, {**TP, **FSDP}, marks=pytest.mark.full),
    ],
)
def test_t35_models_that_transformers_divides_train_as_on_one_process(tmp_path, kind, ranks, sizes):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    model.save_pretrained(tmp_path)
    model, wanted = train(None, model)
    for seen, weights in worlds.run(divided, ranks, tmp_path, sizes):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5, msg=name)
    config_of(kind).save_pretrained(tmp_path / "after")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=1e-4, atol=1e-4)
