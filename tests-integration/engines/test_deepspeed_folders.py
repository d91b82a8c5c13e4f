"""Folders that DeepSpeed and Accelerate write, continued by every strategy, against DeepSpeed continuing itself."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

WORDS, WIDTH, STEPS = 11, 5, 3
ENGINES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2 offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3},
    "3 in pieces": {"stage": 3, "sub_group_size": 40},
}


class Net(nn.Module):
    """With a tied, a frozen and an unused parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(self.words(x))))
        out: Tensor = self.head(hidden * self.scale.to(hidden.dtype))
        return out


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=0.1)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows).float(), (rows + 1) % WORDS)


def rows_of(step: int, ranks: int, rank: int) -> Tensor:
    return ((torch.arange(8) * 3 + step) % WORDS).chunk(ranks)[rank]


def by_hand(name: str, precision: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the engine when it saved, and after it trained on."""
    import deepspeed
    import torch.distributed as dist

    from accel_state import PartialState

    PartialState(cpu=True)
    config: dict[str, Any] = {
        "zero_optimization": ENGINES[name],
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    model = make()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model), config=config, dist_init_required=False
    )

    def train(first: int) -> None:
        for step in range(first, first + STEPS):
            engine.backward(loss_of(engine, rows_of(step, dist.get_world_size(), dist.get_rank())))
            engine.step()

    def weights() -> dict[str, Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=ENGINES[name]["stage"] == 3):
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    train(0)
    engine.save_checkpoint(folder)
    saved = weights()
    train(STEPS)
    return saved, weights()


def go_on(target: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same weights, read and trained on."""
    from accel_train import Accelerator, DeepSpeedPlugin

    stage = target.removeprefix("zero")
    plugin = DeepSpeedPlugin(zero_stage=int(stage)) if stage.isdigit() else None
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=plugin, strategy=None if plugin is not None else target
    )
    model = make(seed=9)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.load_state(folder, allow_missing_rng=True)
    if accelerator.is_main_process:
        assert any(re.search("DeepSpeed.*Nothing in it tells a complete save", str(w.message)) for w in said)

    def weights() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    loaded = weights()
    for step in range(STEPS, 2 * STEPS):
        rows = rows_of(step, accelerator.num_processes, accelerator.process_index)
        accelerator.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()
    return loaded, weights()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("0", "zero3"),
        ("1", "fsdp2"),
        ("2", "ddp"),
        ("2 offload", "single"),
        ("3", "zero1"),
        ("3", "single"),
        ("3 in pieces", "single"),
        ("3 in pieces", "zero3"),
    ],
)
def test_every_strategy_continues(tmp_path, name, target):
    [(saved, wanted), _] = worlds.run(by_hand, 2, name, "no", str(tmp_path))
    for loaded, found in worlds.run(go_on, 1 if target == "single" else 2, target, str(tmp_path)):
        assert loaded.keys() == saved.keys()
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["0", "1", "3"])
def test_float32_copies_are_read(tmp_path, name):
    """The engine has rounded weights in the model, and trains those that its own tool finds."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    [(saved, _), _] = worlds.run(by_hand, 2, name, "bf16", str(tmp_path))
    [(loaded, _)] = worlds.run(go_on, 1, "single", str(tmp_path))
    for key, value in saved.items():
        torch.testing.assert_close(loaded[key].to(value.dtype), value, rtol=0, atol=0)
    assert not torch.equal(loaded["up.weight"], saved["up.weight"].float())
    if name != "0":
        for key, value in get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)).items():
            torch.testing.assert_close(loaded[key], value.float(), rtol=0, atol=0)


def by_accelerate(folder: str) -> dict[str, Tensor]:
    """On one process: without GPUs Accelerate counts one, whatever the number of ranks."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(worlds.free_port())}
    os.environ["ACCELERATE_USE_CPU"] = "false"  # asked for the CPU, it would not use the engine
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = make()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(2 * STEPS):
        if step == STEPS:
            accelerator.save_state(folder)
        accelerator.backward(loss_of(model, rows_of(step, 1, 0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def after_accelerate(folder: str) -> dict[str, Tensor]:
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make(seed=9)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with pytest.warns(UserWarning, match="DeepSpeed, ZeRO stage 2"):
        accelerator.load_state(folder)
    for step in range(STEPS, 2 * STEPS):
        accelerator.backward(loss_of(model, rows_of(step, 1, 0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_state_of_accelerate_is_continued(tmp_path):
    [wanted] = worlds.run(by_accelerate, 1, str(tmp_path / "state"))
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {"pytorch_model", "random_states_0.pkl"}
    [found] = worlds.run(after_accelerate, 1, str(tmp_path / "state"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def written(stage: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The prepared model is the engine, and has its methods."""
    from accel_train import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = make()
    engine, optimizer = accelerator.prepare(model, optimizer_of(model))

    def train(first: int) -> dict[str, Tensor]:
        for step in range(first, first + STEPS):
            rows = rows_of(step, accelerator.num_processes, accelerator.process_index)
            accelerator.backward(loss_of(engine, rows))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(engine).items()}

    saved = train(0)
    engine.save_checkpoint(folder)
    last = train(STEPS)
    engine.load_checkpoint(folder)
    torch.testing.assert_close(train(STEPS), last, rtol=0, atol=0)
    return saved, last


@pytest.mark.parametrize("stage", [2, 3])
def test_the_engine_writes_and_reads_its_own(tmp_path, stage):
    [(saved, last), _] = worlds.run(written, 2, stage, str(tmp_path))
    [(loaded, found)] = worlds.run(go_on, 1, "single", str(tmp_path))
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    torch.testing.assert_close(found, last, rtol=1e-5, atol=1e-6)


def test_a_missing_rank_changes_nothing(tmp_path):
    worlds.run(by_hand, 2, "2", "no", str(tmp_path))
    [path] = Path(tmp_path).glob("*/*rank_1_mp_rank_00_optim_states.pt")
    path.unlink()
    with pytest.raises(worlds.RankError, match=r"CheckpointNotFoundError.*by 2 ranks.*rank 1 .* is missing"):
        worlds.run(go_on, 1, "single", str(tmp_path))
