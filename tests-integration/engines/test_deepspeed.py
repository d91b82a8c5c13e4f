"""Training with the real DeepSpeed: against the engine driven by hand, and against plain PyTorch.

`hatch run engines:deepspeed` also runs the conformance suite with every ZeRO stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

STAGES = [0, 1, 2, 3]
ROWS, BATCH = 24, 2


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model: nn.Module, accelerator: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def plugin_of(stage: int, **more: Any) -> Any:
    from accel_train import DeepSpeedPlugin

    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto", **more}
    return DeepSpeedPlugin(hf_ds_config=config)


def by_accelerator(stage: int, precision: str, accumulation: int, clip: float | None) -> Any:
    """Losses, norms and weights of two epochs; the loader's last window is short."""
    from accel_train import Accelerator

    accelerator = Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin_of(stage), gradient_accumulation_steps=accumulation
    )
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    )
    losses, norms = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients and clip is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
    return losses, norms, whole(model, accelerator)


def by_hand(stage: int, precision: str, accumulation: int, clip: float | None) -> Any:
    """The same with DeepSpeed's own calls, which clip as configured."""
    import deepspeed
    import torch.distributed as dist

    from accel_state import PartialState

    rank = PartialState().process_index
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip or 0.0,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    x, y = make_data()
    losses, norms = [], []
    for _ in range(2):
        micro = [slice(start, start + BATCH) for start in range(0, ROWS, BATCH)][
            rank :: dist.get_world_size()
        ]
        for first in range(0, len(micro), accumulation):
            window = micro[first : first + accumulation]
            for rows in window:
                loss = ((engine(x[rows].to(dtype)).float() - y[rows]) ** 2).mean()
                losses.append(loss.item())
                engine.backward(loss / len(window), scale_wrt_gas=False)
            engine.step()
            if clip is not None and engine.get_global_grad_norm() is not None:
                norms.append(float(engine.get_global_grad_norm()))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, norms, weights


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_engine_computes_what_it_computes_by_hand(stage, precision, clip):
    """But for roundings: of tensors at other addresses, and of a clipping factor that is applied elsewhere."""
    ours = worlds.run(by_accelerator, 2, stage, precision, 4, clip)
    theirs = worlds.run(by_hand, 2, stage, precision, 4, clip)
    bound = 1e-6 if precision == "no" else 1e-2
    for (losses, norms, weights), (raw_losses, raw_norms, raw_weights) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(losses, raw_losses, rtol=bound, atol=bound)
        if raw_norms:
            torch.testing.assert_close(norms, raw_norms, rtol=bound, atol=bound)
        for name, raw in raw_weights.items():
            torch.testing.assert_close(weights[name].to(raw.dtype), raw, rtol=bound, atol=bound)


# Optimizers and schedulers of the configuration


def accumulated(stage: int | None, counting: bool) -> dict[str, Tensor]:
    """Three windows of 5 micro-batches an epoch on 2 ranks, the last of 2; rows have different numbers of items."""
    from accel_train import Accelerator

    plugin = None if stage is None else plugin_of(stage)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=5)
    model = make_model()
    x, y = make_data()
    # 3, 2 and 1 of each row's numbers count.
    items = (torch.arange(ROWS) % 3).unsqueeze(1) < torch.arange(3) + 1
    loader = DataLoader(TensorDataset(x, y, items), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for rows, wanted, mask in loader:
            with accelerator.accumulate(model):
                errors = (model(rows) - wanted).square() * mask
                if counting:
                    accelerator.backward(errors.sum(), num_items=mask.sum())
                else:
                    accelerator.backward(errors.sum() / mask.sum())
                optimizer.step()
                optimizer.zero_grad()
    return whole(model, accelerator)


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_t44_accumulation_equals_ddp(stage, counting):
    wanted = worlds.run(accumulated, 2, None, counting)[0]
    for found in worlds.run(accumulated, 2, stage, counting):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, which decay as the configuration says, and biases, which do not."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")]},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def warming(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def placeholders(stage: int, scheduler: str, folder: str) -> Any:
    """Rates of every step and weights; 12 steps are planned for one process, and two ranks take 6."""
    from accel_train import Accelerator, DummyOptim, DummyScheduler

    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    section = {"type": "WarmupDecayLR", "params": {**dict.fromkeys(names, "auto"), "warmup_type": "linear"}}
    plugin = plugin_of(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        **({"scheduler": section} if scheduler == "configured" else {}),
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = make_model()
    optimizer = DummyOptim(grouped(model), lr=0.02, weight_decay=0.5)
    dummy = DummyScheduler(
        optimizer,
        total_num_steps=12,
        warmup_num_steps=2,
        lr_scheduler_callable=None if scheduler == "configured" else warming,
    )
    loader = DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    model, optimizer, dummy, loader = accelerator.prepare(model, optimizer, dummy, loader)
    rates = []
    for number, (x, y) in enumerate(loader):
        assert [optimizer.param_groups[0]["lr"]] * 2 == dummy.get_last_lr()
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        dummy.step()
        optimizer.zero_grad()
        if number == 2:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return rates, [group["weight_decay"] for group in optimizer.param_groups], whole(model, accelerator)


def plain_placeholders(scheduler: str) -> tuple[list[float], dict[str, Tensor]]:
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    model = make_model()
    optimizer = torch.optim.AdamW(grouped(model), lr=0.02, weight_decay=0.5)
    made: Any = warming(optimizer)
    if scheduler == "configured":
        made = WarmupDecayLR(optimizer, 6, 0.0, 0.02, 2, "linear")
    x, y = make_data()
    rates = []
    for first in range(0, ROWS, 2 * BATCH):
        rows = slice(first, first + 2 * BATCH)
        rates.append(optimizer.param_groups[0]["lr"])
        ((model(x[rows]) - y[rows]) ** 2).mean().backward()
        optimizer.step()
        made.step()
        optimizer.zero_grad()
    return rates, dict(model.state_dict())


@pytest.mark.parametrize("scheduler", ["configured", "callable"])
@pytest.mark.parametrize("stage", [1, 3])
def test_placeholders_become_what_the_configuration_says(tmp_path, stage, scheduler):
    """Groups keep options of their own; one step of the optimizer is one step of the engine's schedule."""
    wanted, expected = plain_placeholders(scheduler)
    for rates, decays, weights in worlds.run(placeholders, 2, stage, scheduler, str(tmp_path)):
        assert rates == pytest.approx(wanted, rel=1e-9)
        assert decays == [0.5, 0.0]
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def schedule(offload: bool) -> list[float]:
    """Learning rates of a scheduler that the script built on its own optimizer."""
    from accel_train import Accelerator

    zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    accelerator = Accelerator(deepspeed_plugin=plugin_of(2, zero_optimization=zero))
    model = make_model()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = accelerator.prepare(scheduler)
    rates = []
    for x, y in loader:
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(model.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("offload", [False, True])
def test_a_scheduler_changes_the_rate_that_the_engine_uses(offload):
    """With offload the optimizer is replaced by DeepSpeed's own, which is compiled at its first use."""
    rates = worlds.run(schedule, 2, offload, timeout=300)
    # Two ranks take two steps of the schedule per step of the optimizer.
    torch.testing.assert_close(rates[0], [1e-2 * 0.5**n for n in range(1, 7)], rtol=1e-9, atol=0)


def offloaded(stage: int, device: str, folder: str) -> dict[str, Tensor]:
    """Weights after some steps, saved and loaded in between."""
    from accel_train import Accelerator

    more = {"nvme_path": folder} if device == "nvme" else {}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": device, **more}}
    if stage == 3:
        zero["offload_param"] = {"device": device, **more}
    config = {
        "zero_optimization": zero,
        "aio": {"block_size": 131072, "queue_depth": 8, "single_submit": False, "overlap_events": False},
    }
    accelerator = Accelerator(deepspeed_plugin=plugin_of(stage, **config))
    model = make_model()
    loader = DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    for number, (x, y) in enumerate(loader):
        accelerator.backward(((model(x) - y) ** 2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            accelerator.save_state(f"{folder}/state")
            accelerator.load_state(f"{folder}/state")
    return whole(model, accelerator)


def plain_offloaded() -> dict[str, Tensor]:
    model = make_model()
    optimizer = optimizer_of(model)
    x, y = make_data()
    for first in range(0, ROWS, 2 * BATCH):
        losses = [
            ((model(x[rows]) - y[rows]) ** 2).mean()
            for rows in (slice(first, first + BATCH), slice(first + BATCH, first + 2 * BATCH))
        ]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("stage", "device"), [(2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_offload(tmp_path, stage, device):
    """DeepSpeed's own CPU optimizer, clipping, and a state saved and loaded on the way."""
    expected = plain_offloaded()
    for weights in worlds.run(offloaded, 2, stage, device, str(tmp_path), timeout=400):
        torch.testing.assert_close(weights, dict(expected), rtol=2e-5, atol=2e-6)


# Models


def two_models(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two models whose outputs are added in one loss."""
    from accel_train import Accelerator

    accelerator = Accelerator(deepspeed_plugin=plugin_of(stage))
    models = [make_model(0), make_model(1)]
    optimizers = [optimizer_of(model) for model in models]
    loader = DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    first, second, *optimizers, loader = accelerator.prepare(*models, *optimizers, loader)
    for x, y in loader:
        accelerator.backward(((first(x) + second(x) - y) ** 2).mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole(first, accelerator), whole(second, accelerator)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_loss_of_two_models(stage):
    if stage == 0:
        with pytest.raises(worlds.RankError, match=r"PrepareError.*ZeRO stages 1 to 3"):
            worlds.run(two_models, 2, stage)
        return
    models = [make_model(0), make_model(1)]
    optimizers = [optimizer_of(model) for model in models]
    x, y = make_data()
    for first in range(0, ROWS, 2 * BATCH):
        rows = slice(first, first + 2 * BATCH)
        loss = ((models[0](x[rows]) + models[1](x[rows]) - y[rows]) ** 2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for found in worlds.run(two_models, 2, stage):
        for weights, model in zip(found, models, strict=True):
            torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def by_name() -> Any:
    """A model that is trained with one configuration, and one that is evaluated with another."""
    from accel_train import Accelerator

    plugins = {"student": plugin_of(2), "teacher": plugin_of(3)}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    assert accelerator.deepspeed_plugin is plugins["student"]
    student = make_model()
    student, optimizer = accelerator.prepare(student, optimizer_of(student))
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is plugins["teacher"]
    teacher = accelerator.prepare(make_model(1))
    x, _ = make_data()
    with torch.no_grad():
        targets = teacher(x)
    accelerator.backward(((student(x) - targets) ** 2).mean())
    optimizer.step()
    stages = student.zero_optimization_stage(), teacher.zero_optimization_stage()
    return stages, targets, whole(student, accelerator), whole(teacher, accelerator)


def test_configurations_by_name():
    model, teacher = make_model(), make_model(1)
    optimizer = optimizer_of(model)
    x, _ = make_data()
    ((model(x) - teacher(x).detach()) ** 2).mean().backward()
    optimizer.step()
    for stages, targets, student, kept in worlds.run(by_name, 2):
        assert stages == (2, 3)
        torch.testing.assert_close(targets, teacher(x).detach())
        torch.testing.assert_close(student, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kept, dict(teacher.state_dict()), rtol=0, atol=0)


def of_two_precisions() -> None:
    from accel_train import Accelerator

    Accelerator(deepspeed_plugins={"student": plugin_of(2), "teacher": plugin_of(3, bf16={"enabled": True})})


def test_plugins_of_two_precisions_are_refused():
    match = r"plugin 'teacher' enables bf16 in .*hf_ds_config, but this run .*mixed_precision='no'"
    with pytest.raises(worlds.RankError, match=match):
        worlds.run(of_two_precisions, 2)


def transformer(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16,
            n_layer=2,
            n_head=2,
            vocab_size=40,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            **small, num_key_value_heads=1, vocab_size=40, num_local_experts=4, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**small, num_key_value_heads=1, vocab_size=40)
    )


def train_transformer(kind: str, stage: int, lora: bool, folder: str) -> dict[str, Tensor]:
    from accel_train import Accelerator, DeepSpeedPlugin

    moe = "MixtralSparseMoeBlock" if kind == "mixtral" else None
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, transformer_moe_cls_names=moe)
    )
    model = transformer(kind)
    if lora:
        model = with_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    loader = DataLoader(tokens(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return whole(model, accelerator)


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def tokens() -> Tensor:
    return torch.randint(0, 40, (8, 8), generator=torch.Generator().manual_seed(2))


def load_transformer(kind: str, lora: bool, folder: str, **arguments: Any) -> dict[str, Tensor]:
    from accel_train import Accelerator

    accelerator = Accelerator(**arguments)
    model = transformer(kind)
    if lora:
        model = with_lora(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(tokens(), batch_size=2))
    accelerator.load_state(folder)
    return whole(model, accelerator)


@pytest.mark.parametrize(
    ("kind", "lora"), [("llama", False), ("gpt2", False), ("mixtral", False), ("llama", True)]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_transformers(tmp_path, kind, lora, stage):
    """Trained as on one process; what is saved loads without DeepSpeed."""
    model = transformer(kind)
    if lora:
        model = with_lora(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    for batches in tokens().view(-1, 2, 2, 8):
        optimizer.zero_grad()
        (sum(model(input_ids=batch, labels=batch).loss for batch in batches) / 2).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    folder = str(tmp_path / "state")
    for weights in worlds.run(train_transformer, 2, kind, stage, lora, folder, timeout=120):
        assert weights.keys() == expected.keys()
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
    [loaded] = worlds.run(load_transformer, 1, kind, lora, folder)
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)


def test_the_example_by_its_configuration_file(tmp_path):
    script = Path(__file__).parents[2] / "docs" / "examples" / "strategies" / "char_llama.py"
    curves = {}
    for name in ("single", "deepspeed"):
        command = [
            sys.executable,
            "-m",
            "accel_cli",
            "launch",
            "--config_file",
            str(script.with_name(f"{name}.yaml")),
        ]
        subprocess.run([*command, str(script), "--steps", "6"], cwd=tmp_path, check=True, timeout=200)
        curves[name] = json.loads((tmp_path / f"losses_{name}.json").read_text())
    assert curves["deepspeed"] == pytest.approx(curves["single"], rel=1e-4)


TRL = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
SCRIPT = """
import torch
from accel_train import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(4, 8)).mean())
optimizer.step()
weights = accelerator.get_state_dict(model)
plugin = accelerator.deepspeed_plugin
accelerator.print(
    "told", accelerator.num_processes, plugin.zero_stage, accelerator.mixed_precision, weights["weight"].dtype
)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("file", "told 2 3 bf16 torch.bfloat16"),
        ("flags", "told 2 1 no torch.float32"),
        ("torchrun", "told 2 1 no torch.float32"),
        ("alone", "told 1 2 no torch.float32"),
    ],
)
def test_user_paths(tmp_path, how, expected):
    (tmp_path / "zero3.yaml").write_text(TRL)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accel_cli", "launch", "--cpu"]
    environment = dict(os.environ)
    if how == "file":
        command = [*launch, "--config_file", "zero3.yaml", "--num_processes", "2"]
    elif how == "flags":
        command = [*launch, "--use_deepspeed", "--zero_stage", "1", "--num_processes", "2"]
    else:
        command = [sys.executable]
        environment |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_DEEPSPEED": "true"}
        if how == "torchrun":
            command += ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
            environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "1"
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def refused(case: str) -> None:
    from accel_train import Accelerator

    accelerator = Accelerator(deepspeed_plugin=plugin_of(2))
    model, other = make_model(), make_model(1)
    if case == "others":
        accelerator.prepare(model, optimizer_of(other))
    elif case == "two optimizers":
        accelerator.prepare(model, optimizer_of(model), torch.optim.SGD(model.parameters(), lr=1.0))
    elif case == "both models":
        accelerator.prepare(model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0))
    elif case == "untrained":
        accelerator.backward(accelerator.prepare(model)(torch.ones(1, 5)).sum())
    else:
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        loss = model(torch.ones(1, 5)).sum()
        if case == "argument":
            accelerator.backward(loss, create_graph=True)
        accelerator.backward(loss)
        if case == "some":
            accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)
        if case == "closure":
            optimizer.step(lambda: loss)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("others", "holds parameters of no model in this prepare"),
        ("two optimizers", "comes with two optimizers"),
        ("both models", "holds parameters of 2 models"),
        ("untrained", "no model was prepared with its optimizer"),
        ("argument", r"backward\(create_graph=…\) is not known to DeepSpeed"),
        ("some", "3 fewer than Sequential trains"),
        ("closure", r"optimizer.step\(closure\) is not known"),
    ],
)
def test_refused_on_all_ranks(case, match):
    with pytest.raises(worlds.RankError, match=match):
        worlds.run(refused, 2, case)


def dropped(stage: int, offload: bool) -> dict[str, Tensor]:
    """A gradient that the script drops does not come back in the next step."""
    from accel_train import Accelerator

    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    accelerator = Accelerator(deepspeed_plugin=plugin_of(stage, **config))
    model = make_model()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    x, y = make_data()
    for wanted in (True, False, True, False, True):
        accelerator.backward(((model(x) - y) ** 2).mean() * (1 if wanted else 1000))
        if wanted:
            optimizer.step()
        optimizer.zero_grad()
    return whole(model, accelerator)


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_dropped_gradients(stage, offload):
    model = make_model()
    optimizer = optimizer_of(model)
    x, y = make_data()
    for _ in range(3):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    for weights in worlds.run(dropped, 2, stage, offload):
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def options(case: str) -> Any:
    """Losses of a small Llama under an option, whether it was built divided, and how many ranks read differently."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from accel_train import Accelerator, DeepSpeedPlugin

    config: dict[str, Any] = {"zero_optimization": {"stage": 2 if case == "autotp" else 3}}
    if case == "autotp":
        config["tensor_parallel"] = {"autotp_size": 2}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(config, zero3_init_flag=case == "init"),
        dynamo_backend="eager" if case == "compile" else None,
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=40))
    divided = [hasattr(parameter, "ds_id") for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens(), batch_size=2))
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    return losses, all(divided), accelerator.strategy.batch.size


@pytest.mark.parametrize("case", ["plain", "compile", "init", "autotp"])
def test_options_of_the_engine(case):
    """Compiled as eager; built divided; with tensor parallelism both ranks of a pair read the same samples."""
    (losses, divided, readers), (others, _, _) = worlds.run(options, 2, case, timeout=200)
    assert losses == others
    assert losses[-1] < losses[0]
    assert divided == (case == "init")
    assert readers == (1 if case == "autotp" else 2)
    assert len(losses) == 3 * 4 // readers
    if case == "compile":
        eager = worlds.run(options, 2, "plain", timeout=200)[0][0]
        assert losses == pytest.approx(eager, rel=1e-5)
