"""Submission of a run as a job of a scheduler or a cloud.

To add an engine: a module with a subclass of `Submission`, a line in `SUBMISSIONS`, and a name in ``ENGINES``. An
installed package adds one by an entry point.
"""

from __future__ import annotations

from accel_state.config.sections.submission import ENGINES
from accel_state.launching.submission.base import Job, JobState, JobStatus, Submission, accelerators_of
from accel_state.registry import Registry

__all__ = ["SUBMISSIONS", "Job", "JobState", "JobStatus", "Submission", "accelerators_of"]

SUBMISSIONS: Registry[Submission] = Registry(
    "launcher",
    "accel_state.launchers",
    {name: f"accel_state.launching.submission.{name}:{name.upper()}" for name in ENGINES},
    base=Submission,
)
"""Value of the option ``submit`` to the ``Submission`` for that engine."""
