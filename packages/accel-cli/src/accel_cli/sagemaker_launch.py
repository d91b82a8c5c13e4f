"""``accel launch`` with the configuration of a job on Amazon SageMaker."""

from __future__ import annotations

import sys

from accel_cli.render import show_text
from accel_state.config.merge import Resolved
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.launching.submission.sagemaker_job import describe_job, find_credentials, plan_job
from accel_state.launching.target import Target

__all__ = ["launch_on_sagemaker"]


def launch_on_sagemaker(resolved: Resolved, target: Target) -> int:
    """Start the script as a training job and wait for its end; with ``--dry-run`` print the job.

    Returns:
        0; a job that fails raises.

    Raises:
        ConfigError, LaunchError, MissingDependencyError: see ``plan_job`` and ``start_job``.
    """
    config = resolved.config
    assert isinstance(config, SageMakerConfig)
    job = plan_job(config, target, resolved.file)
    credentials = find_credentials(config)
    if not config.quiet:
        for note in (*resolved.notes, *job.notes):
            show_text(f"accel: {note}", sys.stderr)
    if config.dry_run:
        sys.stdout.write(f"{describe_job(job, credentials)}\n")
        return 0
    from accel_state.launching.submission.sagemaker_sdk import start_job

    result = start_job(job, credentials)
    what = "the model is at" if job.additional.get("wait", True) else "the job is started:"
    sys.stdout.write(f"{what} {result}\n")
    return 0
