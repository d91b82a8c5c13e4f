"""Submission of a run as a job of a scheduler or a cloud.

To add a scheduler: a module with a subclass of `Submission`, a line in `SUBMISSIONS`, and a choice of the option
``submit``. An installed package adds one by an entry point.
"""

from __future__ import annotations

from accel_state.launching.submission.base import Job, Submission
from accel_state.registry import Registry

__all__ = ["SUBMISSIONS", "Job", "Submission"]

SUBMISSIONS: Registry[Submission] = Registry(
    "launcher",
    "accel_state.launchers",
    {"slurm": "accel_state.launching.submission.slurm:SLURM"},
    base=Submission,
)
"""Value of the option ``submit`` to the ``Submission`` for that scheduler."""
