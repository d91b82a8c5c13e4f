"""SkyPilot: a managed job, one launcher on each node.

Fields: SkyPilot's documentation, "SkyPilot YAML". ``recover_on_exit_codes`` tells a saved run from a failed one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from accel_state.config.sections.submission import SubmitSection
from accel_state.constants import PREEMPTED
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.base import COMMON, CONTAINER, Job, JobState, JobStatus, Submission
from accel_state.launching.submission.tools import answer, lines, parsed, tool

__all__ = ["SKYPILOT", "SkyPilotSubmission"]

_REMEDY = (
    "install SkyPilot (pip install skypilot) and log in to a cloud; accel launch --dry_run prints the task"
)
_STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "SUBMITTED": "waiting",
    "STARTING": "waiting",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "RECOVERING": "preempted",
    "SUCCEEDED": "done",
    "CANCELLING": "cancelled",
    "CANCELLED": "cancelled",
}
"""States of managed jobs; those that begin with FAILED are failures."""
_ENDS = (100, 101, 103)
"""Exit codes of ``sky jobs logs`` that are the state of the job: failed, not finished, cancelled (``JobExitCode``)."""


class SkyPilotSubmission(Submission):
    """Submits with ``sky jobs launch``."""

    title = "SkyPilot"
    has_own_files = True
    uses = COMMON | CONTAINER

    def script(self, job: Job) -> str:
        """See the base class."""
        self.check(job)
        config, about = job.config, job.config.submission
        kind, number = job.accelerators
        if number and not kind:
            raise ConfigError(
                f"--submit_gpus_per_machine {number} names no accelerator; SkyPilot chooses machines by it: pass "
                f"such as --submit_gpus_per_machine H100:{number}"
            )
        resources = {
            "accelerators": f"{kind}:{number}" if number else None,
            "cpus": None if about.cpus_per_task is None else f"{about.cpus_per_task}+",
            "memory": None if about.memory is None else f"{job.memory_bytes / 2**30:g}+",
            "image_id": None if about.image is None else f"docker:{about.image}",
            # A machine that ends because another one failed (76) is not recovered: the other one's code decides.
            "job_recovery": {"max_restarts_on_errors": about.retries, "recover_on_exit_codes": [PREEMPTED]},
        }
        task: dict[str, Any] = {
            "name": job.label,
            "num_nodes": config.num_machines,
            "resources": {name: value for name, value in resources.items() if value is not None},
            "workdir": about.workdir,
            "envs": job.variables,
            "secrets": dict.fromkeys(_secrets(about)),
            "volumes": {folder: claim for claim, folder in job.volumes},
            "setup": "\n".join(about.setup or ()),
            "run": shlex.join(job.container_command()),
        }
        return yaml.safe_dump({name: value for name, value in task.items() if value}, sort_keys=False)

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class."""
        text = self.script(job)
        path = tool("sky", environ, _REMEDY)
        secrets = _secrets(job.config.submission)
        missing = [name for name in secrets if name not in environ]
        if missing:
            raise ConfigError(
                f"--submit_secrets {missing[0]}: SkyPilot takes it from this shell, where no variable has that name; "
                "export it first"
            )
        words = [
            word for name in secrets for word in ("--secret", name)
        ]  # a name alone: its value is not an argument
        with self.written(text) as file:
            answer(path, ["jobs", "launch", "--yes", "--async", *words, file], environ)
        return f"submitted {job.label}; accel jobs ls --engine skypilot shows its number and state"

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> list[JobStatus]:
        """See the base class. All managed jobs of the user: SkyPilot keeps no mark of who has submitted them."""
        path = tool("sky", environ, _REMEDY)
        data = parsed(answer(path, ["jobs", "queue", "--all", "--output", "json"], environ), path)
        if not isinstance(data, list) or not all(isinstance(job, dict) and "job_id" in job for job in data):
            raise LaunchError(
                f"{path} has answered {str(data)[:80]!r}, which is not a list of jobs; is it complete?"
            )
        found = []
        for job in data:
            word = str(job.get("status") or "")
            state = "failed" if word.startswith("FAILED") else _STATES.get(word, "unknown")
            name, why = str(job.get("job_name") or ""), str(job.get("failure_reason") or "")
            found.append(JobStatus(str(job["job_id"]), name, state, why=why))
        return found[::-1]  # the newest comes first

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """See the base class."""
        words = ["jobs", "logs", "--follow" if follow else "--no-follow", _checked(job)]
        yield from lines(tool("sky", environ, _REMEDY), words, environ, _ENDS)

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """See the base class."""
        answer(tool("sky", environ, _REMEDY), ["jobs", "cancel", "--yes", _checked(job)], environ)
        return f"cancelled job {job}"


SKYPILOT = SkyPilotSubmission()


def _checked(job: str) -> str:
    if not job.isdecimal():
        raise ConfigError(f"{job!r} is not a job of SkyPilot; expected a number, as accel jobs ls lists it")
    return job


def _secrets(about: SubmitSection) -> list[str]:
    for name in about.secrets or ():
        if not name.isidentifier():
            raise ConfigError(
                f"--submit_secrets {name!r} is not the name of a variable; SkyPilot takes secrets from the variables "
                "of this shell"
            )
    return list(about.secrets or ())
