"""Ray: a job of Ray's job API whose driver starts one launcher on each machine (``ray_machines``).

Options of the job and of its runtime environment: Ray's documentation, "Ray Jobs API" and "Environment Dependencies".
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import ConfigError, LaunchError, MissingDependencyError
from accel_state.launching.submission.base import COMMON, Job, JobState, JobStatus, Submission
from accel_state.launching.submission.tools import printable
from accel_state.messages import first_line

__all__ = ["RAY", "RaySubmission"]

_DRIVER = "accel_state.launching.submission.ray_machines"
_MARK = "accel"
"""Metadata of the jobs that `accel launch` has submitted, with the number of machines."""
_ADDRESS = "http://127.0.0.1:8265"
_STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "STOPPED": "cancelled",
    "SUCCEEDED": "done",
    "FAILED": "failed",
}
_LOOK = 1.0


class RaySubmission(Submission):
    """Submits to the job server of a Ray cluster."""

    title = "Ray"
    has_own_files = True
    uses = COMMON | {"time", "signal_time", "workdir", "env", "address"}

    def script(self, job: Job) -> str:
        """See the base class: the request to Ray's job server as JSON."""
        return json.dumps(self._request(job), indent=2) + "\n"

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class."""
        request = self._request(job)
        client = _client(job.config.submission, environ)
        number = _asked(client.submit_job, **request)
        return f"submitted job {number}; accel jobs logs {number} --engine ray --follow shows its output"

    def _request(self, job: Job) -> dict[str, Any]:
        self.check(job)
        config, about = job.config, job.config.submission
        if about.workdir is not None and not Path(about.workdir).is_dir():
            raise ConfigError(
                f"--submit_workdir {about.workdir} is not a folder here; Ray uploads the folder with the script to its "
                "machines"
            )
        if config.spares:
            raise ConfigError(
                "--spares has no meaning on Ray, which starts a lost machine's part on another one; leave it out"
            )
        kind, gpus = job.accelerators
        resources: dict[str, float] = {"CPU": about.cpus_per_task or 1}
        if gpus:
            resources["GPU"] = gpus
        if kind:
            resources[f"accelerator_type:{kind}"] = 0.001  # Ray's convention for "a machine with this type"
        if about.memory is not None:
            resources["memory"] = job.memory_bytes
        machines = {
            "command": job.container_command(num_machines=1, min_machines=None, num_processes=None),
            "per_machine": job.processes,
            "machines": config.num_machines,
            "min_machines": config.min_machines,
            "resources": resources,
            "retries": about.retries,
            "grace": about.signal_time,
            "patience": config.connect_timeout,
            "limit": job.seconds,
        }
        runtime: dict[str, Any] = {"env_vars": job.variables} if about.env else {}
        if about.workdir is not None:
            runtime["working_dir"] = about.workdir
        return {
            "entrypoint": shlex.join(["python", "-m", _DRIVER, json.dumps(machines)]),
            "submission_id": job.label,
            "runtime_env": runtime,
            "metadata": {_MARK: str(config.num_machines), "job_submission_id": job.label, "name": job.name},
        }

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> list[JobStatus]:
        """See the base class."""
        found = []
        for job in sorted(_asked(_client(about, environ).list_jobs), key=lambda job: job.start_time or 0):
            about_it = job.metadata or {}
            if not str(about_it.get(_MARK, "")).isdecimal() or not job.submission_id:
                continue
            state = _STATES.get(str(getattr(job.status, "value", job.status)), "unknown")
            name = about_it.get("name", job.submission_id)
            why = (job.message or "").partition("\n")[0] if state == "failed" else ""
            found.append(JobStatus(job.submission_id, name, state, int(about_it[_MARK]), why))
        return found

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """See the base class."""
        client, shown = _client(about, environ), 0
        while True:
            ended = _STATES.get(_status(client, job)) not in ("waiting", "running") or not follow
            text = _asked(client.get_job_logs, job)
            whole = len(text) if ended else text.rfind("\n") + 1
            yield from text[shown:whole].splitlines()
            shown = whole
            if ended:
                return
            time.sleep(_LOOK)

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """See the base class."""
        client = _client(about, environ)
        if _STATES.get(_status(client, job)) not in ("waiting", "running"):
            raise LaunchError(f"job {job} of Ray has ended already ({_status(client, job)})")
        _asked(client.stop_job, job)
        return f"cancelled job {job}"


RAY = RaySubmission()


def _client(about: SubmitSection, environ: Mapping[str, str]) -> Any:
    """The client of the job server.

    Raises:
        MissingDependencyError: Ray, or the part of it with the job server's client, is not installed.
        LaunchError: the server does not answer.
    """
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise MissingDependencyError(
            "--submit ray needs Ray's client of job servers, which is not installed: pip install 'ray[default]'"
        ) from error
    address = about.address or environ.get("RAY_API_SERVER_ADDRESS") or environ.get("RAY_ADDRESS") or _ADDRESS
    try:
        return JobSubmissionClient(address)
    except (OSError, RuntimeError, ValueError) as error:
        told = re.sub("//[^/@]*@", "//", f"{address} ({printable(first_line(error))})")  # without a password
        raise LaunchError(
            f"no job server of Ray answers at {told}; pass --submit_address http://head:8265, or set RAY_ADDRESS"
        ) from None


def _asked(ask: Callable[..., Any], *words: str, **options: Any) -> Any:
    """An answer of the job server.

    Raises:
        LaunchError: it has refused, or does not answer any more.
    """
    try:
        return ask(*words, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(f"the job server of Ray has refused: {printable(first_line(error))}") from error


def _status(client: Any, job: str) -> str:
    status = _asked(client.get_job_status, job)
    return str(getattr(status, "value", status))
