"""What ``accel prove`` observes of a training: its steps, and noise that ranks draw as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_train.proof.recorder import StepRecorder

__all__ = ["step_recorder"]


def step_recorder(job: Path) -> StepRecorder:
    """Return what records the steps of an `Accelerator` in a process that ``accel prove`` has started.

    Args:
        job: the path that it has put into the environment.
    """
    from accel_train.proof.recorder import StepRecorder  # no other process needs it

    return StepRecorder(job)
