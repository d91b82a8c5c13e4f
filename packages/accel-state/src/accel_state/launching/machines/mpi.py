"""The ``mpirun`` command of MPI launches."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from accel_state.errors import ConfigError, LaunchError, TargetError

__all__ = ["check_mpi", "mpi_argv"]


def mpi_argv(
    hostfile: str,
    size: int,
    local_size: int,
    command: Iterable[str],
    exported: Iterable[str],
    open_mpi: bool,
) -> tuple[str, ...]:
    """The ``mpirun`` command that starts ``size`` ranks, ``local_size`` of them on each host.

    Args:
        hostfile: file that lists the hosts.
        size: ranks over all hosts.
        local_size: ranks on each host.
        command: the command that each rank runs.
        exported: names of variables that must be forwarded to ranks on other hosts.
        open_mpi: ``mpirun`` is Open MPI's, which forwards only variables named on its command line; the
            launchers of MPICH and its derivatives (Intel MPI, MVAPICH) have other flags and forward all.
    """
    if open_mpi:
        forwarded = [word for name in sorted(exported) for word in ("-x", name)]
        placing = ["--npernode", str(local_size), "-n", str(size), "--bind-to", "socket"]
        return ("mpirun", "--hostfile", hostfile, *placing, *forwarded, *command)
    return ("mpirun", "-f", hostfile, "-ppn", str(local_size), "-n", str(size), *command)


def check_mpi(hostfile: str, environ: Mapping[str, str]) -> bool:
    """Check that an MPI launch can start.

    Returns:
        whether ``mpirun`` is Open MPI's.

    Raises:
        ConfigError: the hostfile does not exist.
        TargetError: ``mpirun`` is missing.
        LaunchError: ``mpirun --version`` fails.
    """
    if not Path(hostfile).expanduser().exists():
        raise ConfigError(
            f"the MPI hostfile {hostfile!r} does not exist; pass another one with --mpirun_hostfile"
        )
    tool = shutil.which("mpirun", path=environ.get("PATH"))
    if tool is None:
        raise TargetError(
            "mpirun was not found on PATH; install an MPI implementation (Open MPI, MPICH, Intel MPI), "
            "or leave --mpirun_hostfile out: on one machine no MPI is needed"
        )
    answer = subprocess.run(
        [tool, "--version"], capture_output=True, text=True, env=dict(environ), check=False
    )
    if answer.returncode != 0:
        raise LaunchError(
            f"{tool} --version failed with exit code {answer.returncode}: {answer.stderr.strip()}"
        )
    return "Open MPI" in answer.stdout
