"""Frozen parameters in the groups of an optimizer, in a state that goes from one strategy to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

FULL = pytest.mark.full
ROWS, WIDTH = 8, 4


def make_model() -> nn.Module:
    """In float64; one layer is frozen, and one bias."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    model[1].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def prepared(kind: str) -> Any:
    """An accelerator, and a prepared model with its optimizer; the second group is wholly frozen."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accel_train import Accelerator, ParallelismConfig

    degrees = {"tp": {"tp_size": 2}, "pp": {"pp_size": 2}}.get(kind)
    accelerator = Accelerator(
        cpu=True,
        strategy=None if degrees else kind,
        parallelism_config=ParallelismConfig(**degrees) if degrees else None,
    )
    model = make_model()
    if kind == "tp":
        mesh = accelerator.torch_device_mesh["tp"]
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    groups = [
        {"params": [p for i in (0, 2, 3) for p in model[i].parameters()]},
        {"params": list(model[1].parameters()), "lr": 0.5},
    ]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.05))


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    ranks = accelerator.strategy.batch
    for step in steps:
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x.chunk(ranks.size)[ranks.index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def begun(kind: str, folder: Any) -> None:
    accelerator, model, optimizer = prepared(kind)
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)


def continued(kind: str, folder: Any) -> dict[str, Tensor]:
    accelerator, model, optimizer = prepared(kind)
    if folder is not None:
        accelerator.load_state(folder)
        assert optimizer.param_groups[1]["lr"] == 0.5
    train(accelerator, model, optimizer, range(0 if folder is None else 3, 6))
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        ("single", 1, "fsdp2", 2),
        pytest.param("fsdp2", 2, "ddp", 2, marks=FULL),
        pytest.param("single", 1, "tp", 2, marks=FULL),
        pytest.param("tp", 2, "single", 1, marks=FULL),
        pytest.param("single", 1, "pp", 2, marks=FULL),
        pytest.param("pp", 2, "single", 1, marks=FULL),
    ],
)
def test_a_state_goes_on_as_one_process_would(tmp_path, before, ranks, after, others):
    [wanted] = worlds.run(continued, 1, "single", None)
    worlds.run(begun, ranks, before, tmp_path / "state")
    for found in worlds.run(continued, others, after, tmp_path / "state"):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
