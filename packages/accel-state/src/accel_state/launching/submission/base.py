"""The contract of an engine that runs jobs, and the job that is submitted to it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from accel_state.config.flags import to_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.config.schema import schema_of
from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import ConfigError, NotAvailableError
from accel_state.messages import is_secret

__all__ = ["COMMON", "CONTAINER", "Job", "JobState", "JobStatus", "Submission", "accelerators_of"]

# The forms that the manual page of sbatch lists under --time.
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_SETTING = re.compile(r"([\w.-]+)=(?=(\S+))")
_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s/:@$][^\s/@]*@")
_HARMLESS = re.compile(
    r"[$`].*|[\d.e+-]+|true|false|none|null|<.*>|\[.*\]|(/[\w.-]+){2,}", re.IGNORECASE | re.DOTALL
)
"""Values that are no secrets under any name: references, numbers, switches, tokens of a tokenizer, paths."""
_LABEL = 40
"""Characters of a label: names of pods, which engines build from it, are DNS labels of at most 63."""

COMMON = frozenset({"job_name", "gpus_per_machine", "cpus_per_task", "memory", "retries"})
"""The options of ``SubmitSection`` that every engine uses."""
CONTAINER = frozenset({"setup", "image", "workdir", "env", "secrets", "volumes"})
"""Those of engines that start an image."""

JobState = Literal["waiting", "running", "done", "preempted", "failed", "cancelled", "unknown"]
"""States of jobs. ``preempted``: the job saved its state, ended with code 75, and waits to be started again."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A submitted job as its engine describes it.

    Attributes:
        id: what ``accel jobs logs`` and ``cancel`` take.
        name: the job's name.
        state: its state.
        machines: number of machines; None if the engine does not say.
        why: the engine's reason, in its words: why a job waits or has failed.
    """

    id: str
    name: str
    state: JobState
    machines: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to submit.

    Attributes:
        config: the resolved configuration.
        command: the launch command that each machine runs on the file system of this one, without the flags of the
            submission.
        script: the script's name, for the name of the job.
        arguments: the script's arguments.
        suffix: end of the label, so that two jobs of one script do not share a name, an address or a store.
    """

    config: LaunchConfig
    command: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.config.submission.job_name or Path(self.script).stem

    @property
    def label(self) -> str:
        """The name as a DNS label (RFC 1123) of at most 40 characters; it ends with ``suffix`` unless the user has
        named the job.

        Raises:
            ConfigError: the user's name is not such a label.
        """
        given = self.config.submission.job_name
        if given is not None:
            if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", given) or len(given) > _LABEL:
                raise ConfigError(
                    f"--submit_job_name {given!r} cannot name a job of this engine; expected at most {_LABEL} "
                    "lower-case letters, digits and dashes, beginning with a letter and not ending with a dash"
                )
            return given
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"job-{plain}"
        end = f"-{self.suffix}" if self.suffix else ""
        return plain[: _LABEL - len(end)].strip("-") + end

    @property
    def gpus(self) -> str | None:
        """Accelerators of each machine, as ``number`` or ``type:number``; None: the ranks compute on the CPU.

        Raises:
            ConfigError: their number is not set, and the machine that submits cannot know it.
        """
        return _gpus(self.config)

    @property
    def accelerators(self) -> tuple[str, int]:
        """See ``accelerators_of``."""
        return accelerators_of(self.config)

    @property
    def processes(self) -> int | None:
        """Processes of each machine; None: the launcher of each machine decides.

        Raises:
            ConfigError: they cannot be divided over the machines.
        """
        processes = _per_machine(self.config)
        return self.accelerators[1] or None if processes is None else processes

    @property
    def seconds(self) -> int | None:
        """The time limit; None without one.

        Raises:
            ConfigError: it has none of Slurm's forms, or is not longer than the time for saving.
        """
        about = self.config.submission
        if about.time is None:
            return None
        if not _TIME.fullmatch(about.time):
            raise ConfigError(
                f"--submit_time {about.time} is not a time limit; expected minutes, 4:00:00, 2-12 (days-hours) or "
                "UNLIMITED"
            )
        if not about.time[0].isdecimal():
            return None
        seconds = _seconds(about.time)
        if self.config.resume and seconds <= about.signal_time:
            raise ConfigError(
                f"--submit_time {about.time} is not longer than --submit_signal_time {about.signal_time} seconds, so "
                "the job would get the stop signal as soon as it starts; raise the first, or lower the second"
            )
        return seconds

    @property
    def variables(self) -> dict[str, str]:
        """The variables of ``--submit_env``.

        Raises:
            ConfigError: one of them is not ``NAME=value``.
        """
        found = {}
        for setting in self.config.submission.env or ():
            name, equals, value = setting.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"--submit_env {setting!r} is not a variable; expected NAME=value")
            found[name] = value
        return found

    @property
    def volumes(self) -> list[tuple[str, str]]:
        """Name of each volume, and the folder that it has in the job.

        Raises:
            ConfigError: one of them is not ``name:/folder``.
        """
        found = []
        for text in self.config.submission.volumes or ():
            name, _, folder = text.partition(":")
            if not name or not folder.startswith("/") or ":" in folder:
                raise ConfigError(f"--submit_volumes {text!r} is not a volume; expected name:/folder")
            found.append((name, folder))
        return found

    @property
    def memory_bytes(self) -> int:
        """The memory of each machine in bytes; 0: not set."""
        memory = self.config.submission.memory
        return 0 if memory is None else self.bytes_of(memory, "--submit_memory")

    @staticmethod
    def bytes_of(text: str, flag: str) -> int:
        """A size in bytes, from Kubernetes' notation of quantities.

        Raises:
            ConfigError: it has another form.
        """
        found = re.fullmatch(r"(\d+)([KMGT]i?)?", text)
        if found is None:
            raise ConfigError(f"{flag} {text!r} is not a size; expected such as 64Gi")
        unit = found[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        return int(found[1]) * (base ** ("KMGT".index(unit[0]) + 1) if unit else 1)

    def shell(self) -> str:
        """The launch command for a shell, where the job sees the files of this machine."""
        return shlex.join(self.command)

    def container_command(self, **changes: Any) -> tuple[str, ...]:
        """The launch command inside an image: every option is a flag, because a file of this machine is not there.

        Args:
            changes: other values of options.
        """
        own = dataclasses.replace(
            self.config, submission=SubmitSection(), submit=None, dry_run=False, **changes
        )
        defaults = to_flags(resolve(environ={}, use_default_file=False).local())
        flags = [word for word in to_flags(own) if word not in defaults]
        return ("accel", "launch", *flags, self.script, *self.arguments)


def accelerators_of(config: LaunchConfig) -> tuple[str, int]:
    """Type of the accelerators of a job's machines, empty if any will do, and their number on each; 0 without any.

    Raises:
        ConfigError: their number is not set, and the machine that submits cannot know it; or it is no number.
    """
    gpus = _gpus(config)
    kind, _, number = (gpus or "0").rpartition(":")
    if not number.isdecimal():
        raise ConfigError(
            f"--submit_gpus_per_machine {gpus} is not a number of accelerators; expected a number, or type:number such "
            "as H100:8"
        )
    return kind, int(number)


def _gpus(config: LaunchConfig) -> str | None:
    if config.submission.gpus_per_machine is not None:
        return config.submission.gpus_per_machine
    if config.use_cpu or config.distributed_type == "MULTI_CPU":
        return None
    processes = _per_machine(config)
    if processes is None:
        raise ConfigError(
            "--submit cannot know how many accelerators the machines of the job have; pass --num_processes (the "
            "total) or --submit_gpus_per_machine, or --cpu"
        )
    return str(processes)


def _per_machine(config: LaunchConfig) -> int | None:
    if config.num_processes is None:
        return None
    if config.num_processes % config.num_machines:
        raise ConfigError(
            f"--num_processes {config.num_processes} is not divisible by --num_machines {config.num_machines}; it "
            "is the total over all machines"
        )
    return config.num_processes // config.num_machines


def _seconds(time: str) -> int:
    """A time limit of Slurm in seconds: ``minutes[:seconds]``, ``h:m:s``, ``days-hours[:m[:s]]``."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _secret_in(text: str) -> str | None:
    """The name of a secret whose value is in a text; None if there is none."""
    if _PASSWORD.search(text):
        return "with the password of an address"
    settings = ((found[1], found[2].strip("\"'")) for found in _SETTING.finditer(text))
    return next(
        (name for name, value in settings if is_secret(name) and not _HARMLESS.fullmatch(value)), None
    )


class Submission(ABC):
    """An engine to which jobs can be submitted.

    Attributes:
        title: the engine's name in messages.
        uses: the options of ``SubmitSection`` that it uses, beside ``engine``; others that are set are refused. None:
            it checks them itself.
        has_own_files: jobs have other files than this machine, so the script need not be here.
    """

    title: ClassVar[str] = "this engine"
    has_own_files: ClassVar[bool] = False
    uses: ClassVar[frozenset[str] | None] = None

    def check(self, job: Job) -> None:
        """Check what all engines have in common.

        Raises:
            ConfigError: an option is set that the engine does not have, or an argument or option holds a secret.
        """
        about = job.config.submission
        for bound in schema_of(SubmitSection).options:
            name = bound.path
            if self.uses is None or name == "engine" or name in self.uses:
                continue
            value = getattr(about, name)
            if value is not None and value != bound.default:
                raise ConfigError(
                    f"{bound.label} is {value!r}, and jobs of {self.title} have no such option; leave it out"
                )
        texts = [("--submit_image", about.image or "")]
        for name in ("env", "setup", "args"):
            texts += [(f"--submit_{name}", text) for text in getattr(about, name) or ()]
        for word, following in zip(job.arguments, (*job.arguments[1:], "-"), strict=False):
            two = word.startswith("--") and "=" not in word and not following.startswith("-")
            texts.append(("the script's argument", f"{word}={following}" if two else word))
        for place, text in texts:
            secret = _secret_in(text)
            if secret is not None:
                raise ConfigError(
                    f"{place} {secret} looks like a secret, which everybody who can see the job would read; let the "
                    "engine keep it (--submit_secrets NAME=secret/key, or a variable of your shell on Slurm), and let "
                    "the script read the variable"
                )

    @staticmethod
    @contextlib.contextmanager
    def written(text: str) -> Iterator[str]:
        """Context with a file that holds ``text``, for a tool that reads no standard input."""
        with tempfile.TemporaryDirectory(prefix="accel-submit-") as folder:
            file = Path(folder) / "job.yaml"
            file.write_text(text, encoding="utf-8")
            yield str(file)

    @abstractmethod
    def script(self, job: Job) -> str:
        """The batch script or the manifest of a job, as ``--dry_run`` prints it.

        Raises:
            ConfigError: an option does not fit this engine.
        """

    @abstractmethod
    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """Submit a job; return a sentence for the user.

        Raises:
            ConfigError: an option does not fit this engine.
            LaunchError: the engine's tool is missing, or refused the job.
        """

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> Sequence[JobStatus]:
        """The user's jobs that were submitted with ``accel launch``, the newest last.

        Args:
            about: the options of the submission, such as the namespace or the address of the engine.
            environ: the environment of this process.

        Raises:
            LaunchError: the engine's tool is missing, does not answer, or answers with something else.
        """
        raise NotAvailableError(f"{self.title} has no list of jobs here; ask its own tools")

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """The lines of a job's output so far; with ``follow`` until it ends.

        Raises:
            LaunchError: there is no such job, or see ``jobs``.
        """
        raise NotAvailableError(f"{self.title} has no logs here; ask its own tools")

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """End a job; return a sentence for the user.

        Raises:
            LaunchError: there is no such job, or see ``jobs``.
        """
        raise NotAvailableError(f"{self.title} cannot cancel jobs from here; ask its own tools")
