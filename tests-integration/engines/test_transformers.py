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


# What transformers#48569 reports of checkpoints of models that its own plans divide: saving hangs, resuming fails on
# shapes, and the optimizer goes on with a wrong state.


def stepped(model, optimizer, first, last, backward=None):
    """Losses of steps with other batches."""
    seen = []
    for step in range(first, last):
        rows = ids().roll(step, 1)
        loss = model(input_ids=rows, labels=rows).loss
        (backward or torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def states_of(model, optimizer):
    """Whole weights and states of AdamW, by name."""
    from torch.distributed.tensor import DTensor

    def whole(value):
        return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()

    named = dict(model.named_parameters())
    kinds = ("exp_avg", "exp_avg_sq", "step")
    found = {f"{name} {kind}": whole(optimizer.state[p][kind]) for name, p in named.items() for kind in kinds}
    return found | {name: whole(parameter) for name, parameter in named.items()}


def resumed(folder, sizes, first, last, alone=None):
    """Steps from the state in a folder, if there is one, and saves; `alone`: the main process calls it alone."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from accel_state import AccelError
    from accel_train import Accelerator, TorchTensorParallelPlugin

    chosen, options = {}, {}
    if sizes:
        chosen = {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=sizes["tp_size"])}
        options = {"distributed_config": DistributedConfig(**sizes)}
    accelerator = Accelerator(cpu=True, **chosen)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if first:
        accelerator.load_state(folder / "state")
    seen = stepped(model, optimizer, first, last, accelerator.backward)
    errors = []
    if alone is not None:
        try:
            if accelerator.is_main_process:
                getattr(accelerator, alone)(*([model] if alone == "save_model" else []), folder / "alone")
            accelerator.wait_for_everyone()
        except AccelError as error:
            errors.append(str(error))
        return errors
    accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")
    return seen, states_of(accelerator.unwrap_model(model), getattr(optimizer, "optimizer", optimizer))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("llama", TP, TP),
        ("llama", TP, {}),
        ("llama", {}, TP),
        ("mixtral", TP, TP),
        pytest.param("qwen3_moe", TP, TP, marks=pytest.mark.full),
        pytest.param("llama", {"tp_size": 4}, TP, marks=pytest.mark.full),
    ],
)
def test_a_divided_model_resumes_with_its_shapes_and_its_optimizer(tmp_path, kind, before, after):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of(kind)
    if before.get("tp_size") == 4:
        config.num_key_value_heads = 4
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = stepped(model, optimizer, 0, 3)
    worlds.run(resumed, before.get("tp_size", 1), tmp_path, before, 0, 3)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.shape for name, value in written.items()} == {
        name: value.shape for name, value in model.state_dict().items() if name in written
    }
    wanted = stepped(model, optimizer, 3, 5)
    whole = states_of(model, optimizer)
    for seen, found in worlds.run(resumed, after.get("tp_size", 1), tmp_path, after, 3, 5):
        assert seen == pytest.approx(wanted, rel=1e-4)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("call", ["save_model", "save_state"])
def test_a_divided_model_that_one_rank_saves_is_an_error_on_all(tmp_path, call):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    for errors in worlds.run(resumed, 2, tmp_path, TP, 0, 1, call, timeout=90):
        assert errors
        assert call in errors[0]
    assert not (tmp_path / "alone").exists() or not any((tmp_path / "alone").iterdir())
