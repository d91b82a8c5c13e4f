"""Models that transformers divides by their plans, trained on ranks, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytest.importorskip(
    "accelerate", reason="transformers needs it for its plans; hatch run engines:transformers installs it"
)


def llama_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_hidden_layers=2,
    )


def ids():
    return (torch.arange(80).view(8, 10) * 3) % 96


def llama_steps(accelerator, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    ranks = (
        (1, 0) if accelerator is None else (accelerator.strategy.batch.size, accelerator.strategy.batch.index)
    )
    rows = ids().chunk(ranks[0])[ranks[1]]
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


def planned(folder, sizes):
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from accel_train import Accelerator, TorchTensorParallelPlugin

    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    config = DistributedConfig(**sizes)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    model, seen = llama_steps(accelerator, model)
    accelerator.save_model(model, folder / "after")
    accelerator.wait_for_everyone()
    return seen, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"tp_size": 2}),
        pytest.param(4, {"tp_size": 2, "fsdp_size": 2}, marks=pytest.mark.full),
    ],
)
def test_models_with_a_plan_of_transformers_train_as_on_one_process(tmp_path, ranks, sizes):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config())
    model.save_pretrained(tmp_path)
    model, wanted = llama_steps(None, model)
    for seen, weights in worlds.run(planned, ranks, tmp_path, sizes):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5, msg=name)
    llama_config().save_pretrained(tmp_path / "after")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "after")
    torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=1e-4, atol=1e-4)
