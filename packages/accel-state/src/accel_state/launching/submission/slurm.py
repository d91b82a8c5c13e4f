"""Slurm: a batch script for ``sbatch`` that runs one launcher per machine.

Options: the manual page of sbatch. Slurm sends the signal of ``--signal`` to the processes of the steps; the launchers
pass it on, ranks with `preemption=True` save and exit with 75, and the script puts the job back into the queue.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accel_state.config.sections.submission import SubmitSection
from accel_state.constants import PREEMPTED
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.base import COMMON, Job, JobState, JobStatus, Submission
from accel_state.launching.submission.tools import answer, tool

__all__ = ["SLURM", "SlurmSubmission"]

_FLAGS = {
    "job-name": "--submit_job_name, or the name of the script,",
    "gpus-per-node": "--submit_gpus_per_machine",
    "cpus-per-task": "--submit_cpus_per_task",
    "partition": "--submit_partition",
    "account": "--submit_account",
    "mem": "--submit_memory",
    "output": "--submit_output, or --log_dir,",
}
_MARK = "accel"
"""Comment of the jobs that `accel launch` has submitted."""
_RETRY = """\
failures=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format=%k | tr -cd 0-9)
case $code in
{done}) ;;
*) if [ "${{failures:-0}}" -lt {retries} ]; then
  scontrol update JobId="$SLURM_JOB_ID" Comment="{mark} $((${{failures:-0}} + 1))" && scontrol requeue "$SLURM_JOB_ID"
fi ;;
esac"""
"""Slurm counts restarts alone, so the comment of the job counts those after failures."""
_STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "REQUEUED": "preempted",
    "PREEMPTED": "preempted",
    "RUNNING": "running",
    "CONFIGURING": "running",
    "COMPLETING": "running",
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
}
"""Slurm's states, as the manual page of squeue lists them."""
_GOES_ON = ("waiting", "running", "preempted")
_LOOK = 1.0
"""Seconds between two looks at the output of a job."""
_JOB = re.compile(r"(\d+)(?:;\S+)?\s*$")


class SlurmSubmission(Submission):
    """Submits with ``sbatch``."""

    title = "Slurm"
    uses = COMMON | {"partition", "account", "time", "signal_time", "output", "setup", "args"}

    def script(self, job: Job) -> str:
        """See the base class. With ``--resume`` the job is signalled before its limit, and requeued after it has
        saved.
        """
        self.check(job)
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job))]
        about = job.config.submission
        lines += ["", *(about.setup or ()), f"srun {job.shell()}", "code=$?"]
        if job.config.resume:
            lines.append(f'if [ "$code" = {PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi')
        if about.retries:
            lines.append(_RETRY.format(done=f"0|{PREEMPTED}", retries=about.retries, mark=_MARK))
        return "\n".join([*lines, 'exit "$code"', ""])

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class."""
        text = self.script(job)
        folder = Path(_output(job)).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)  # Slurm does not, and then loses the output
        except OSError as error:
            raise LaunchError(
                f"the folder {folder} for the job's log cannot be created ({error.strerror})"
            ) from error
        told = _ask("sbatch", ["--parsable"], environ, text)
        match = _JOB.search(told)
        if match is None:
            raise LaunchError(f"sbatch has answered {told.strip()[:200]!r}, which names no job")
        return f"submitted job {match[1]}; its output goes to {_output(job).replace('%j', match[1])}"

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> list[JobStatus]:
        """See the base class. Slurm forgets jobs some minutes after their end (MinJobAge)."""
        form = ["--me", "--states=all", "--noheader", "--sort=i", "--format=%i|%k|%T|%D|%r|%j"]
        found = []
        for line in _ask("squeue", form, environ).splitlines():
            cells = line.strip().split("|", 5)
            if len(cells) != 6 or cells[1].split(" ")[0] != _MARK:
                continue
            number, _, word, nodes, why, name = cells
            state = _STATES.get(word, "unknown")
            if word == "PENDING" and _field(number, "Restarts", environ) not in ("", "0"):
                state = "preempted"
            told = "" if why == "None" else why
            found.append(JobStatus(number, name, state, int(nodes) if nodes.isdecimal() else None, told))
        return found

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """See the base class. The file is read where Slurm writes it, so this machine has to see it."""
        path = Path(_field(_checked(job), "StdOut", environ))
        while not path.is_file():
            if not follow or _STATES.get(_field(job, "JobState", environ)) not in _GOES_ON:
                raise LaunchError(f"job {job} has written no output yet; it goes to {path}")
            time.sleep(_LOOK)
        with path.open(encoding="utf-8", errors="replace") as stream:
            begun = ""
            while True:
                ended = not follow or _STATES.get(_field(job, "JobState", environ)) not in _GOES_ON
                for line in stream:
                    begun += line
                    if line.endswith("\n"):  # else the rest of it will be written
                        yield begun
                        begun = ""
                if ended:
                    break
                time.sleep(_LOOK)
            if begun:
                yield begun

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """See the base class."""
        _field(_checked(job), "JobState", environ)  # scancel says nothing about jobs that there are not
        _ask("scancel", [job], environ)
        return f"cancelled job {job}"


SLURM = SlurmSubmission()


def _ask(name: str, words: Sequence[str], environ: Mapping[str, str], text: str | None = None) -> str:
    remedy = "run this command on a login node of the cluster; accel launch --dry_run prints the script"
    return answer(tool(name, environ, remedy), words, environ, text)


def _checked(job: str) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", job):
        raise ConfigError(f"{job!r} is not a job of Slurm; expected a number, as accel jobs lists it")
    return job


def _field(job: str, name: str, environ: Mapping[str, str]) -> str:
    """A field of a job in the answer of ``scontrol``, one in a line or a word; empty if it is not there."""
    answer = _ask("scontrol", ["show", "job", job], environ)
    found = re.search(rf"(?:^|\s){name}=(.*?)(?=\s+\w+=|\s*$)", answer, re.MULTILINE)
    return found[1] if found is not None else ""


def _options(job: Job) -> list[str]:
    config, about = job.config, job.config.submission
    _ = job.seconds  # checks the time limit
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
        "mem": about.memory and about.memory.removesuffix("i"),  # Slurm's G has 1024 MB
        "time": about.time,
        "comment": _MARK,
        "output": _output(job),
    }
    if config.spares:
        found["nodes"] = str(config.num_machines + config.spares)
    for name, value in found.items():
        _one_line(_FLAGS.get(name, f"the option {name} of sbatch"), value)
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in found.items() if value is not None]
    if config.resume or about.retries:
        options += ["--requeue", "--open-mode=append"]
    if config.resume and about.signal_time:
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


def _output(job: Job) -> str:
    folder = Path(job.config.log_dir) if job.config.log_dir is not None else Path()
    return job.config.submission.output or str(folder / f"{job.name}-%j.log")
