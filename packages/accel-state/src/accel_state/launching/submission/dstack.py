"""dstack: a task, one launcher on each node.

Fields: dstack's reference, ".dstack.yml", "task". dstack starts a run again after an interruption, or for some time
after any exit code but 0. It does not tell codes apart and counts nothing, so a loop in the task keeps the contract.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from accel_state.config.sections.submission import SubmitSection
from accel_state.constants import PEER_FAILED, PREEMPTED
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.base import COMMON, CONTAINER, Job, JobState, JobStatus, Submission
from accel_state.launching.submission.tools import answer, lines, parsed, tool

__all__ = ["DSTACK", "DstackSubmission"]

_REMEDY = "install dstack (pip install dstack) and set its project; accel launch --dry_run prints the task"
_NAME = r"[a-z][a-z0-9-]{1,40}"
_STATES: Mapping[str, JobState] = {
    "pending": "preempted",  # a run that waits to be tried again
    "submitted": "waiting",
    "provisioning": "waiting",
    "running": "running",
    "terminating": "running",
    "terminated": "cancelled",
    "failed": "failed",
    "done": "done",
}
_WEEK = "7d"
_LOOP = """\
failures=0
stopped=
trap 'stopped=1; kill -TERM "$launcher" 2>/dev/null' TERM
while true; do
  {command} &
  launcher=$!
  wait "$launcher"; code=$?
  while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; code=$?; done
  [ "$code" = 0 ] && exit 0
  [ -n "$stopped" ] && exit "$code"
  if [ "$code" != {preempted} ] && [ "$code" != {peer_failed} ]; then
    failures=$((failures + 1))
    [ "$failures" -gt {retries} ] && exit "$code"
  fi
done
"""
"""On each node. ``wait`` returns when the trap runs, so it is repeated until the launcher has ended."""


class DstackSubmission(Submission):
    """Submits with ``dstack apply``."""

    title = "dstack"
    has_own_files = True
    uses = COMMON | CONTAINER | {"time", "signal_time", "shared_memory"}

    def script(self, job: Job) -> str:
        """See the base class."""
        self.check(job)
        config, about = job.config, job.config.submission
        kind, number = job.accelerators
        resources = {
            "gpu": (f"{kind}:{number}" if kind else number) or None,
            "cpu": None if about.cpus_per_task is None else f"{about.cpus_per_task}..",
            "memory": None if about.memory is None else f"{job.memory_bytes / 2**30:g}GB..",
            "shm_size": None if about.shared_memory is None else _gigabytes(job, about.shared_memory),
        }
        loop = _LOOP.format(
            command=shlex.join(job.container_command()),
            preempted=PREEMPTED,
            peer_failed=PEER_FAILED,
            retries=about.retries,
        )
        task: dict[str, Any] = {
            "type": "task",
            "name": job.label,
            "nodes": config.num_machines if config.num_machines > 1 else None,
            "image": about.image,
            "working_dir": about.workdir,
            "env": [f"{name}={value}" for name, value in job.variables.items()] + _secrets(about),
            "commands": [*(about.setup or ()), loop],
            "resources": {name: value for name, value in resources.items() if value is not None},
            "volumes": [f"{claim}:{folder}" for claim, folder in job.volumes],
            "max_duration": job.seconds,
            "stop_duration": about.signal_time,
            "retry": {"on_events": ["no-capacity", "interruption"], "duration": _WEEK},
        }
        return yaml.safe_dump({name: value for name, value in task.items() if value}, sort_keys=False)

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class."""
        text = self.script(job)
        path = tool("dstack", environ, _REMEDY)
        with self.written(text) as file:
            answer(path, ["apply", "--yes", "--detach", "--file", file], environ)
        return f"submitted {job.label}; accel jobs logs {job.label} --engine dstack shows its output"

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> list[JobStatus]:
        """See the base class. All runs of the project: dstack keeps no mark of who has submitted them."""
        path = tool("dstack", environ, _REMEDY)
        data = parsed(answer(path, ["ps", "--all", "--format", "json"], environ), path)
        if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
            raise LaunchError(
                f"{path} has answered {str(data)[:80]!r}, which is not a list of runs; is it complete?"
            )
        found = []
        for run in data["runs"]:
            try:
                name, task = run["run_spec"]["run_name"], run["run_spec"]["configuration"]
                if task["type"] != "task":
                    continue
                state = _STATES.get(str(run["status"]), "unknown")
                why = run.get("status_message") or run.get("error") or ""
                found.append(JobStatus(str(name), str(name), state, task.get("nodes"), str(why)))
            except (KeyError, TypeError, AttributeError) as error:
                raise LaunchError(f"{path} has answered {str(run)[:80]!r}, which is not a run") from error
        return found[::-1]

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """See the base class. The output of the first node; dstack ends with what there is so far."""
        words = ["attach", "--logs", _checked(job)] if follow else ["logs", _checked(job)]
        yield from lines(tool("dstack", environ, _REMEDY), words, environ)

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """See the base class."""
        answer(tool("dstack", environ, _REMEDY), ["stop", "--yes", _checked(job)], environ)
        return f"cancelled job {job}"


DSTACK = DstackSubmission()


def _checked(job: str) -> str:
    if not re.fullmatch(_NAME, job):
        raise ConfigError(f"{job!r} is not a run of dstack; expected a name, as accel jobs ls lists it")
    return job


def _secrets(about: SubmitSection) -> list[str]:
    """Variables with dstack's references to its secrets."""
    found = []
    for text in about.secrets or ():
        name, _, secret = text.partition("=")
        if not name.isidentifier() or not (secret or name).isidentifier():
            raise ConfigError(
                f"--submit_secrets {text!r} is not a secret of dstack; expected NAME, or NAME=secret where the secret "
                "has another name"
            )
        found.append(f"{name}=${{{{ secrets.{secret or name} }}}}")
    return found


def _gigabytes(job: Job, text: str) -> str:
    return f"{job.bytes_of(text, '--submit_shared_memory') / 2**30:g}GB"
