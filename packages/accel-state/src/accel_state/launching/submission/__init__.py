"""Submission of a run as a job of a scheduler or a cloud.

To add a scheduler: a module with a subclass of `Submission`, a line in `SUBMISSIONS`, and a choice of the option
``submit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_state.launching.submission.base import Job, Submission
from accel_state.launching.submission.slurm import SlurmSubmission

__all__ = ["SUBMISSIONS", "Job", "Submission"]

SUBMISSIONS: Mapping[str, Submission] = MappingProxyType({"slurm": SlurmSubmission()})
"""Value of the option ``submit`` to the ``Submission`` for that scheduler."""
