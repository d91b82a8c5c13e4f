"""The base class of submissions, and the job that they submit."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_state.config.launch import LaunchConfig
from accel_state.errors import ConfigError

__all__ = ["Job", "Submission"]


@dataclass(frozen=True, slots=True)
class Job:
    """A run to submit.

    Attributes:
        config: the resolved configuration.
        command: the launch command that each machine runs, without the flags of the submission.
        script: the script's name, for the name of the job.
    """

    config: LaunchConfig
    command: tuple[str, ...]
    script: str

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.config.submission.job_name or Path(self.script).stem

    @property
    def gpus(self) -> str | None:
        """Accelerators of each machine; None: the ranks compute on the CPU.

        Raises:
            ConfigError: their number is not set, and the machine that submits cannot know it.
        """
        config = self.config
        if config.submission.gpus_per_machine is not None:
            return config.submission.gpus_per_machine
        if config.use_cpu or config.distributed_type == "MULTI_CPU":
            return None
        if config.num_processes is None:
            raise ConfigError(
                "--submit cannot know how many accelerators the machines of the job have; pass --num_processes (the "
                "total) or --submit_gpus_per_machine, or --cpu"
            )
        if config.num_processes % config.num_machines:
            raise ConfigError(
                f"--num_processes {config.num_processes} is not divisible by --num_machines {config.num_machines}; it "
                "is the total over all machines"
            )
        return str(config.num_processes // config.num_machines)

    def shell(self) -> str:
        """The launch command for a shell."""
        return shlex.join(self.command)


class Submission(ABC):
    """A scheduler to which jobs can be submitted."""

    @abstractmethod
    def script(self, job: Job) -> str:
        """The batch script of a job.

        Raises:
            ConfigError: an option does not fit this scheduler.
        """

    @abstractmethod
    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """Submit a job; return a sentence for the user.

        Raises:
            ConfigError: an option does not fit this scheduler.
            LaunchError: the scheduler's tool is missing or refused the job.
        """
