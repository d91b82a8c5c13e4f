"""Training states for tests of object storage, whose content follows from a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_ckpt import open_training_state, save_training_state

LARGE = 10_000_000
"""Elements: 40 MB, three parts of an upload."""


def values(step: int, elements: int = LARGE) -> Tensor:
    return torch.arange(elements, dtype=torch.float32) * (step + 1)


def save(place: str, step: int, elements: int = LARGE, **options: Any) -> Any:
    """Save the state of a step, of six objects."""
    return save_training_state(
        place,
        models=[{"w": values(step, elements)}],
        shared={"step": step, "moment": torch.full((1000,), float(step))},
        per_rank={"rng": torch.tensor([step])},
        **options,
    )


def check(place: str | Path) -> int:
    """Compare every value of a state with what its step says; returns the step."""
    checkpoint = open_training_state(place)
    step: int = checkpoint.shared["step"]
    weights = checkpoint.models[0]["w"]
    assert torch.equal(weights, values(step, len(weights)))
    assert torch.equal(checkpoint.shared["moment"], torch.full((1000,), float(step)))
    assert checkpoint.per_rank(0)["rng"].tolist() == [step]
    return step
