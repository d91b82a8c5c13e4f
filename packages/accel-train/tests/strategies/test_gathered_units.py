"""What a forward without a backward leaves of a model that FSDP divides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
FEATURES = 6
LOOKS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
    ).double()


def prepared(division: str) -> tuple[Any, nn.Module]:
    """An accelerator and a model: divided in one unit or several, by the strategy or by the script."""
    from torch.distributed.fsdp import fully_shard

    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    model = chain()
    if division.startswith("script"):
        accelerator = Accelerator(cpu=True, strategy="ddp" if "ddp" in division else "fsdp2")
        return accelerator, fully_shard(model, reshard_after_forward=False)
    units = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    options = {
        "one unit": {},
        "units": units,
        "units stay": {**units, "reshard_after_forward": False},
        "units of two": {**units, "reshard_after_forward": 2},
        "hybrid": {"dp_replicate_size": 2},
    }
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options[division])), model


def train(look: str, then: str, division: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, with a look at the model between backward and step, which leaves no trace.

    Args:
        look: how the script calls the model in between.
        then: what follows.
        division: see `prepared`; None: plain PyTorch.
    """
    accelerator, model = (None, chain()) if division is None else prepared(division)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(8, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), x)
        early = list(model.parameters())  # FSDP has whole ones in their place now
        accelerator.backward(loss) if accelerator else loss.backward()
        with LOOKS[look]():
            found.append(model(x).sum().item())
        clip = accelerator or nn.utils
        if then == "norm":
            found.append(float(clip.clip_grad_norm_(model.parameters(), 0.01)))
        elif then == "norm of an early list":
            found.append(float(clip.clip_grad_norm_(early, 0.01)))
        elif then == "value":
            clip.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
        optimizer.zero_grad()
        if then == "edit":
            with torch.no_grad():
                model(x)
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        with torch.no_grad():
            found.append(model(x).sum().item())
    return found, dict(accelerator.get_state_dict(model) if accelerator else model.state_dict())


def check(ranks: int, look: str, then: str, division: str) -> None:
    expected, weights = train(look, then, None)
    for found, theirs in worlds.run(train, ranks, look, then, division):
        assert found == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(theirs, weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("then", ["step", "norm", "norm of an early list", "value", "edit"])
def test_a_look_between_backward_and_step_changes_nothing(look: str, then: str) -> None:
    check(2, look, then, "one unit")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("division", ["units", "units stay", "script", "script under ddp"])
def test_nor_with_other_units(look: str, division: str) -> None:
    check(2, look, "norm", division)


@pytest.mark.full
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("division", ["units of two", "hybrid"])
def test_nor_on_four_ranks(look: str, division: str) -> None:
    check(4, look, "norm", division)
