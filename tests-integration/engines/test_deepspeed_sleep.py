"""States of DeepSpeed's engines that are in host memory between phases of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

#: What moves without DeepSpeed's own Adam.
KINDS = {
    1: ("parameters", "gradients", "optimizer"),
    2: ("parameters", "gradients", "optimizer"),
    3: ("parameters", "gradients"),
}


def prepared(stage: int, **zero: Any) -> Any:
    from accel_train import Accelerator, DeepSpeedPlugin

    config = {"zero_optimization": {"stage": stage, **zero}, "train_micro_batch_size_per_gpu": 2}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer


def step(accelerator: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    rank = accelerator.process_index
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    accelerator.backward((model(x) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()


def trained(stage: int, sleeps: bool) -> dict[str, Tensor]:
    from accel_train import OffloadedStatesError

    accelerator, model, optimizer = prepared(stage)
    for number in range(4):
        step(accelerator, model, optimizer, number)
        if sleeps:
            report = accelerator.offload_states(include=KINDS[stage])
            assert report.total == 0  # the device is the host
            for refused in (lambda: model(torch.ones(2, 5)), lambda: accelerator.get_state_dict(model)):
                with pytest.raises(OffloadedStatesError, match="reload_states"):
                    refused()
            accelerator.reload_states()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_continues_as_without_sleep(stage, ranks):
    expected = worlds.run(trained, ranks, stage, False)
    found = worlds.run(trained, ranks, stage, True)
    for here, there in zip(found, expected, strict=True):
        for name, value in there.items():
            assert torch.equal(here[name], value), name


def moved(stage: int) -> list[bool]:
    """Whether the engine's own records say that states are away, at each point."""
    accelerator, model, optimizer = prepared(stage)
    step(accelerator, model, optimizer, 0)
    engine = accelerator.strategy.made[0].engine
    found = [bool(engine.optimizer.offloaded_states)]
    accelerator.offload_states(model, include="parameters")
    found.append(bool(engine.optimizer.offloaded_states))
    accelerator.reload_states(model)
    found.append(bool(engine.optimizer.offloaded_states))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_moves_them(stage):
    assert worlds.run(moved, 1, stage) == [[False, True, False]]


def refused(stage: int, waiting: bool, zero: dict[str, Any]) -> str:
    accelerator, model, optimizer = prepared(stage, **zero)
    if waiting:
        accelerator.backward((model(torch.ones(2, 5)) ** 2).mean())
    try:
        accelerator.offload_states()
    except RuntimeError as error:
        if waiting:
            optimizer.step()
        step(accelerator, model, optimizer, 1)  # nothing has changed
        return f"{type(error).__name__}: {error}"
    return "moved"


@pytest.mark.parametrize(
    ("stage", "waiting", "zero", "message"),
    [
        (0, False, {}, r"NotAvailableError.*zero_stage=1"),
        (2, True, {}, r"OffloadedStatesError.*after optimizer.step\(\)"),
        (3, False, {}, r"NotAvailableError.*FusedAdam.*include="),
        (3, False, {"offload_param": {"device": "cpu"}}, r"NotAvailableError.*Leave offload_param out"),
    ],
)
def test_what_it_cannot_is_refused_before_anything_changes(stage, waiting, zero, message):
    import re

    for found in worlds.run(refused, 1, stage, waiting, zero):
        assert re.search(message, found), found
