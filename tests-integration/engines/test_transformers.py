"""Models that transformers divides by their plans, trained on ranks, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch

from testkit import worlds
from testkit.language_models import config_of, ids, train

pytest.importorskip(
    "accelerate", reason="transformers needs it for its plans; hatch run engines:transformers installs it"
)


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


def in_windows(folder, sizes, steps, load):
    """Steps of two micro-batches each, from a saved state or from the beginning, and a save."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp2", gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    if load:
        accelerator.load_state(folder / "state")
    ranks = accelerator.strategy.batch
    rows = ids().chunk(ranks.size)[ranks.index]
    norms = []
    for _ in range(steps):
        for part in rows.chunk(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=part, labels=part).loss)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(folder / "state")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return norms[1::2], weights


def experts_over_fewer_ranks(folder):
    """The error of a model whose experts FSDP divides, too."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from accel_train import Accelerator
    from accel_train.errors import PrepareError

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    config = DistributedConfig(fsdp_size=4, ep_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    try:
        accelerator.prepare(model)
    except PrepareError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_experts_that_transformers_divides_over_fewer_ranks_than_fsdp_are_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("qwen3_moe")).save_pretrained(tmp_path)
    for error in worlds.run(experts_over_fewer_ranks, 4, tmp_path):
        assert "'model.layers.0.mlp.experts.gate_up_proj' of FSDPQwen3MoeForCausalLM is divided by" in error
        assert "parallelism_config=ParallelismConfig(ep_size=2)" in error


def test_experts_that_transformers_divides_train_in_windows_and_continue(tmp_path):
    from transformers import AutoModelForCausalLM

    ranks, sizes = 2, {**FSDP, "ep_size": 2}

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    model.save_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted = []
    for _ in range(3):
        model(input_ids=ids(), labels=ids()).loss.backward()
        wanted.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    first = worlds.run(in_windows, ranks, tmp_path, sizes, 2, False)
    after = worlds.run(in_windows, ranks, tmp_path, sizes, 1, True)
    for (begun, _), (norms, weights) in zip(first, after, strict=True):
        torch.testing.assert_close(torch.tensor([*begun, *norms]), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
