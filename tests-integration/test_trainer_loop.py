"""The loop of transformers' Trainer: it accumulates and scales by itself, and declares when gradients are complete.

It calls `_set_sync_gradients` on every micro-batch, runs all but the last of a window under `no_sync`, and clips and
steps after the last. The oracle is one big batch of all ranks' samples per window, in float64, without the library.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from testkit import worlds

STEPS = 3
MICRO_BATCHES = 7  # two windows of 3 and one of 1
ROWS = 2
DIM = 4
MAX_NORM = 0.5


def batches(world_size: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """By rank: inputs and targets of each micro-batch."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [[(draw(ROWS, DIM), draw(ROWS, 1)) for _ in range(MICRO_BATCHES)] for _ in range(world_size)]


def windows(items: list[Any]) -> list[list[Any]]:
    return [items[start : start + STEPS] for start in range(0, len(items), STEPS)]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(DIM, 1, dtype=torch.float64)


def flat(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def trainer_loop(precision: str = "no") -> list[tuple[list[float], float, bool]]:
    """After each window: the weights, the norm before clipping, whether the gradient was dropped."""
    from accel_train import Accelerator, GradientAccumulationPlugin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the launcher's number of steps is not used
        accelerator = Accelerator(
            mixed_precision=precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    mine = batches(accelerator.num_processes)[accelerator.process_index]
    seen = []
    for window in windows(mine):
        samples = ROWS * len(window) * accelerator.num_processes  # Trainer gathers this number itself
        for number, (x, y) in enumerate(window):
            last = number == len(window) - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else accelerator.no_sync(model=model):
                x, y = x.to(accelerator.device), y.to(accelerator.device)
                loss = (model(x) - y).square().sum() / samples * accelerator.num_processes
                accelerator.backward(loss)
            if not last:
                continue
            accelerator.gradient_state._set_sync_gradients(True)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            assert not accelerator.optimizer_step_was_skipped
            model.zero_grad()
            dropped = all(parameter.grad is None for parameter in model.parameters())
            seen.append((flat(accelerator.unwrap_model(model)), float(norm), dropped))
    return seen


def one_big_batch(world_size: int) -> list[tuple[list[float], float]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for parts in zip(*(windows(rank) for rank in batches(world_size)), strict=True):
        x = torch.cat([inputs for part in parts for inputs, _ in part])
        y = torch.cat([targets for part in parts for _, targets in part])
        (model(x) - y).square().sum().div(len(x)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((flat(model), float(norm)))
    return seen


@pytest.mark.parametrize("launched", [None, "4"], ids=["", "launched with 4 steps"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_t43_a_client_that_scales_by_itself_gets_the_gradient_of_one_big_batch(world_size, launched):
    environ = {} if launched is None else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": launched}
    expected = one_big_batch(world_size)
    for seen in worlds.run(trainer_loop, world_size, environ=environ):
        assert len(seen) == len(expected) == 3
        for (weights, norm, dropped), (reference, reference_norm) in zip(seen, expected, strict=True):
            assert weights == pytest.approx(reference, rel=1e-12)
            assert norm == pytest.approx(reference_norm, rel=1e-12)
            assert dropped


@pytest.mark.parametrize("world_size", [1, 2])
def test_under_fp16_the_norm_is_that_of_unscaled_gradients(world_size):
    expected = one_big_batch(world_size)
    for seen in worlds.run(trainer_loop, world_size, "fp16"):
        for (weights, norm, _), (reference, reference_norm) in zip(seen, expected, strict=True):
            assert norm == pytest.approx(reference_norm, rel=5e-3)
            assert weights == pytest.approx(reference, abs=5e-3)


def reductions() -> list[int]:
    """How often DDP reduced, after each micro-batch of a window."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from accel_train import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    count = 0

    def hook(state, bucket):  # torch accepts no other annotations than its own classes
        nonlocal count
        count += 1
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    seen = []
    for number in range(STEPS):
        last = number == STEPS - 1
        accelerator.gradient_state._set_sync_gradients(last)
        with contextlib.nullcontext() if last else accelerator.no_sync(model=model):
            accelerator.backward(model(torch.ones(1, DIM, dtype=torch.float64)).sum())
        seen.append(count)
    return seen


def test_only_the_last_micro_batch_of_a_window_communicates():
    assert worlds.run(reductions, 2) == [[0, 0, 1]] * 2
