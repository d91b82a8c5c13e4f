"""Slurm: a batch script for ``sbatch`` that runs one launcher per machine.

Options: the manual page of sbatch. Slurm sends the signal of ``--signal`` to the processes of the steps; the launchers
pass it on, ranks with `preemption=True` save and exit with 75, and the script puts the job back into the queue.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from accel_state.constants import PREEMPTED
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.base import Job, Submission

__all__ = ["SLURM", "SlurmSubmission"]

# The forms that the manual page of sbatch lists under --time.
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_FLAGS = {
    "job-name": "--submit_name, or the name of the script,",
    "gpus-per-node": "--submit_gpus_per_machine",
    "cpus-per-task": "--submit_cpus_per_task",
    "partition": "--submit_partition",
    "account": "--submit_account",
    "output": "--submit_output, or --log_dir,",
}
_JOB = re.compile(r"(\d+)(?:;\S+)?\s*$")


class SlurmSubmission(Submission):
    """Submits with ``sbatch``."""

    def script(self, job: Job) -> str:
        """See the base class. With ``--resume`` the job is signalled before its limit, and requeued after it has
        saved.
        """
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job))]
        lines += ["", *(job.config.submission.setup or ()), f"srun {job.shell()}", "code=$?"]
        if job.config.resume:
            lines.append(f'if [ "$code" = {PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi')
        return "\n".join([*lines, 'exit "$code"', ""])

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class."""
        text = self.script(job)
        tool = shutil.which("sbatch", path=environ.get("PATH"))
        if tool is None:
            raise LaunchError(
                "--submit slurm needs sbatch, which was not found on PATH; run this command on a login node of the "
                "cluster, or add --dry_run to see the script"
            )
        folder = Path(_output(job)).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)  # Slurm does not, and then loses the output
        except OSError as error:
            raise LaunchError(
                f"the folder {folder} for the job's log cannot be created ({error.strerror})"
            ) from error
        answer = subprocess.run(
            [tool, "--parsable"], input=text, capture_output=True, text=True, env=dict(environ), check=False
        )
        match = _JOB.search(answer.stdout)
        if answer.returncode or match is None:
            raise LaunchError(
                f"sbatch refused the job (exit code {answer.returncode}): {(answer.stderr or answer.stdout).strip()}"
            )
        return f"submitted job {match[1]}; its output goes to {_output(job).replace('%j', match[1])}"


SLURM = SlurmSubmission()


def _options(job: Job) -> list[str]:
    config, about = job.config, job.config.submission
    found = {
        "job-name": job.name,
        "nodes": f"{config.min_machines}-{config.num_machines}"
        if config.min_machines
        else str(config.num_machines),
        "ntasks-per-node": "1",
        "gpus-per-node": job.gpus,
        "cpus-per-task": about.cpus_per_task,
        "partition": about.partition,
        "account": about.account,
        "time": about.time,
        "output": _output(job),
    }
    if config.spares:
        found["nodes"] = str(config.num_machines + config.spares)
    if about.time is not None and not _TIME.fullmatch(about.time):
        raise ConfigError(
            f"--submit_time {about.time} is not a time limit of Slurm; expected minutes, 4:00:00, 2-12 (days-hours) "
            "or UNLIMITED"
        )
    for name, value in found.items():
        _one_line(_FLAGS.get(name, f"the option {name} of sbatch"), value)
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in found.items() if value is not None]
    if config.resume and about.time is not None and _seconds(about.time) <= about.signal_time:
        raise ConfigError(
            f"--submit_time {about.time} is not longer than --submit_signal_time {about.signal_time} seconds, so the "
            "job would get the stop signal as soon as it starts; raise the first, or lower the second"
        )
    if config.resume:
        options += ["--requeue", "--open-mode=append"]
        if about.signal_time:
            options.append(f"--signal=USR1@{about.signal_time}")
    for extra in about.args or ():
        _one_line("--submit_args", extra)
        if not extra.startswith("-"):
            raise ConfigError(
                f"--submit_args {extra!r} is not an option of sbatch; write it with its dashes: "
                f"--submit_args=--constraint=a100"
            )
        options.append(extra)
    return options


def _one_line(flag: str, value: object) -> None:
    """Refuse a value that would end its comment line: the rest would run as a line of the script.

    Raises:
        ConfigError: the value has a line break or another control character.
    """
    if value is not None and not str(value).isprintable():
        raise ConfigError(
            f"{flag} is {str(value)[:80]!r}; a value in a batch script is one line of printable characters. Remove the "
            "others"
        )


def _seconds(time: str) -> float:
    """A time limit of Slurm in seconds: ``minutes[:seconds]``, ``h:m:s``, ``days-hours[:m[:s]]``."""
    if not time[0].isdecimal():
        return float("inf")
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _output(job: Job) -> str:
    folder = Path(job.config.log_dir) if job.config.log_dir is not None else Path()
    return job.config.submission.output or str(folder / f"{job.name}-%j.log")
