"""The loss scale of DeepSpeed's engines in fp16, across saves. They run on the CPU, if they are told that it can."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

FULL = pytest.mark.full
ROWS, WINDOW, MICRO_BATCHES, OVERFLOWING, SAVED_AFTER = 4, 2, 18, (4, 10), 10
SCALE = {"initial_scale_power": 6, "hysteresis": 1}


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from accel_train.strategies.deepspeed.strategy import DeepSpeedStrategy

    able = dataclasses.replace(DeepSpeedStrategy.capabilities, precisions_on={})
    with (
        patch.object(CPU_Accelerator, "is_fp16_supported", lambda self: True),
        patch.object(DeepSpeedStrategy, "capabilities", able),
    ):
        yield


def begin(
    stage: int | None, *, offload: bool = False, static: float = 0, grows: int = 2, precision: str = "fp16"
) -> Any:
    """An accelerator, and a prepared model with its optimizer; without a stage, on one process.

    Args:
        stage: of ZeRO.
        offload: optimizer states are in host memory.
        static: a fixed loss scale; 0: it changes.
        grows: steps after which it grows.
        precision: that is computed in.
    """
    from accel_train import Accelerator, DeepSpeedPlugin, GradientAccumulationPlugin, GradScalerKwargs

    plugin = None
    if stage is not None:
        zero: dict[str, Any] = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {
            "fp16": {"enabled": True, "loss_scale": static, "loss_scale_window": grows, **SCALE},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        deepspeed_plugin=plugin,
        gradient_accumulation_plugin=GradientAccumulationPlugin(WINDOW, sync_with_dataloader=False),
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=grows)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.zeros(ROWS, 5)), batch_size=2)
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer


def train(
    kind: dict[str, Any],
    first: int = 0,
    end: int = MICRO_BATCHES,
    *,
    save: Any = None,
    load: Any = None,
    overflowing: tuple[int, ...] = OVERFLOWING,
) -> list[tuple[float, bool, dict[str, Tensor]]]:
    """After every step the loss scale, whether it was skipped, and the weights; in float32 without skipped steps."""
    with fp16_on_cpu():
        accelerator, model, optimizer = begin(**kind)
        if load is not None:
            accelerator.load_state(load)
        found = []
        for number in range(first, end):
            if kind.get("precision") and number // WINDOW in {place // WINDOW for place in overflowing}:
                continue
            ranks = accelerator.strategy.batch
            x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number))
            with accelerator.accumulate(model):
                loss = model(x.chunk(ranks.size)[ranks.index]).square().mean()
                accelerator.backward(loss * (1e30 if number in overflowing else 1))
                optimizer.step()
                optimizer.zero_grad()
            if save is not None and number == SAVED_AFTER:
                accelerator.save_state(save)
            if accelerator.sync_gradients:
                weights = accelerator.get_state_dict(model)
                weights = {name: value.float().clone() for name, value in weights.items()}
                found.append((scale_in(accelerator, model), optimizer.step_was_skipped, weights))
    return found


def scale_in(accelerator: Any, model: Any) -> float:
    engine = getattr(model, "optimizer", None)
    if engine is not None:
        return float(engine.loss_scale)
    return 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()


def interrupted(kind: dict[str, Any], folder: Any) -> None:
    """Compare a run that saves, and one that goes on from there, with one that does neither."""
    whole = train(kind)
    scales, skipped = [scale for scale, _, _ in whole], [flag for _, flag, _ in whole]
    assert skipped == [number in (2, 5) for number in range(MICRO_BATCHES // WINDOW)]
    assert scales[4] != 64
    assert scales[5] == scales[4] / 2
    assert scales[-1] > scales[5]
    saving = train(kind, save=folder)
    resumed = train(kind, SAVED_AFTER + 1, load=folder)
    torch.testing.assert_close(saving, whole, rtol=0, atol=0)
    torch.testing.assert_close(resumed, whole[5:], rtol=0, atol=0)


EVERY_STAGE = pytest.mark.parametrize(
    "kind",
    [
        {"stage": 0},
        {"stage": 2},
        pytest.param({"stage": 1}, marks=FULL),
        pytest.param({"stage": 3}, marks=FULL),
        pytest.param({"stage": 1, "offload": True}, marks=FULL),
        pytest.param({"stage": 2, "offload": True}, marks=FULL),
        pytest.param({"stage": 3, "offload": True}, marks=FULL),
    ],
    ids=str,
)


@EVERY_STAGE
def test_a_run_resumes_with_its_loss_scale_inside_a_window_that_overflows(tmp_path, kind):
    worlds.run(interrupted, 2, kind, tmp_path / "state")


@EVERY_STAGE
def test_gradients_are_whole_in_a_step_after_which_the_scale_grows(kind):
    """The oracle computes in float32, without the step that overflows."""
    [wanted] = worlds.run(train, 1, {"stage": None, "precision": "no"}, overflowing=(4,))
    for found in worlds.run(train, 2, kind, overflowing=(4,)):
        made = [weights for _, skipped, weights in found if not skipped]
        scales = [scale for scale, _, _ in found]
        assert sum(after == 2 * before for before, after in itertools.pairwise(scales)) > 1
        for weights, (_, _, exact) in zip(made, wanted, strict=True):
            torch.testing.assert_close(weights, exact, rtol=2e-3, atol=2e-3)


ONE = {"stage": None, "grows": 100}
STAGES = [{"stage": stage, "grows": 100} for stage in range(2)]


@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        (STAGES[1], 2, ONE, 1),
        (ONE, 1, STAGES[0], 2),
        pytest.param(ONE, 1, STAGES[1], 2, marks=FULL),
        pytest.param(STAGES[0], 2, STAGES[1], 1, marks=FULL),
    ],
)
def test_scaled_gradients_and_their_scale_go_to_other_strategies(tmp_path, before, ranks, after, others):
    """The oracle computes in float32, without the step that overflows and halves the scale."""
    [wanted] = worlds.run(train, 1, {"stage": None, "precision": "no"}, overflowing=(4,))
    worlds.run(train, ranks, before, end=SAVED_AFTER + 1, save=tmp_path / "state", overflowing=(4,))
    for found in worlds.run(train, others, after, SAVED_AFTER + 1, load=tmp_path / "state", overflowing=()):
        assert [(scale, skipped) for scale, skipped, _ in found] == [(32.0, False)] * 4
        for (_, _, weights), (_, _, exact) in zip(found, wanted[-4:], strict=True):
            torch.testing.assert_close(weights, exact, rtol=1e-3, atol=1e-3)


def load_with_another_scale(folder):
    from accel_ckpt import StateMismatchError

    with fp16_on_cpu():
        accelerator, _, _ = begin(2, static=32)
        with pytest.raises(StateMismatchError, match=r"scaled by 128.0, and fp16\.loss_scale fixes .* 32\.0"):
            accelerator.load_state(folder)


def test_a_fixed_scale_refuses_gradients_of_another_one(tmp_path):
    worlds.run(
        train, 2, {"stage": 2, "static": 128}, end=SAVED_AFTER + 1, save=tmp_path / "state", overflowing=()
    )
    worlds.run(load_with_another_scale, 2, tmp_path / "state")


def train_two(stage: int | None, precision: str, *, static: float = 0) -> Any:
    """Train two models with one loss; once the first has a loss of its own, which overflows in 16 bits.

    Returns:
        The weights of both, and the scales in each step with one loss.
    """
    with fp16_on_cpu():
        accelerator, first, first_optimizer = begin(stage, grows=100, static=static, precision=precision)
        second = nn.Linear(5, 3)
        second, second_optimizer = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
        ranks = accelerator.strategy.batch
        scales = []
        for number in range(5):
            x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number))
            x = x.chunk(ranks.size)[ranks.index]
            if number == 2:
                if precision == "fp16":
                    accelerator.backward(first(x).square().mean() * 1e30)
                    first_optimizer.step()
                    first_optimizer.zero_grad()
                continue
            accelerator.backward((first(x) + second(x)).square().mean())
            scales.append([scale_in(accelerator, model) for model in (first, second)])
            for optimizer in (first_optimizer, second_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        states = [accelerator.get_state_dict(model) for model in (first, second)]
    return [{name: value.float().clone() for name, value in state.items()} for state in states], scales


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=FULL), pytest.param(3, marks=FULL)])
def test_one_loss_of_two_models_has_one_scale(stage):
    """The engine of one has skipped a step that the other did not make."""
    [(wanted, _)] = worlds.run(train_two, 1, None, "no")
    for weights, scales in worlds.run(train_two, 2, stage, "fp16"):
        assert scales == [[64, 64], [64, 64], [32, 32], [32, 32]]
        torch.testing.assert_close(weights, wanted, rtol=2e-3, atol=2e-3)


def refused_together(static: float, waiting: bool) -> str:
    from accel_train import PrepareError

    with fp16_on_cpu():
        accelerator, first, _ = begin(2, static=static)
        second = nn.Linear(5, 3)
        second, _ = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
        first.optimizer.loss_scaler.cur_scale = 16.0
        x = torch.ones(1, 5)
        if waiting:
            for model in (first, second):
                accelerator.backward(model(x).square().mean())
        with pytest.raises(PrepareError) as caught:
            accelerator.backward((first(x) + second(x)).square().mean())
        return str(caught.value)


@pytest.mark.parametrize(("static", "waiting"), [(128, False), (0, True)])
def test_scales_that_cannot_be_made_equal_are_refused(static, waiting):
    for error in worlds.run(refused_together, 2, static, waiting):
        assert f"scale losses by 16.0 and {128.0 if static else 64.0}" in error
        assert "call backward() for the loss of each model" in error
