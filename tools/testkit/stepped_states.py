"""States that say which step saved them, for tests of folders of checkpoints."""

from __future__ import annotations

import torch

from accel_ckpt import open_training_state, save_training_state


def save(path, step, disk=None, **options):
    return save_training_state(
        path,
        models=[{"w": torch.full((50,), float(step))}],
        shared={"step": step, "t": torch.tensor([step])},
        per_rank={"rng": torch.tensor([step])},
        **({"disk": disk} if disk else {}),
        **options,
    )


def step_of(path):
    checkpoint = open_training_state(path)
    checkpoint.verify()
    step = checkpoint.shared["step"]
    assert torch.equal(checkpoint.models[0]["w"], torch.full((50,), float(step)))
    assert checkpoint.per_rank(0)["rng"].item() == step
    return step
