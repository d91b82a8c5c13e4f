"""Refuses a world of one process, or of one machine, in a job that has several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from accel_state.clusters.base import read_int
from accel_state.clusters.containers import MACHINE_RANKS, MACHINES
from accel_state.clusters.lsf import hosts_of
from accel_state.clusters.schedulers import find_allocation
from accel_state.errors import ConfigError
from accel_state.whole_files import read_whole

__all__ = ["check_script", "check_shell"]

_WAY_OUT = "to use this machine alone, set ACCEL_CLUSTER=none (or pass --cluster none to accel launch)"
_INTERACTIVE_STEP = str(0xFFFFFFFA)
"""SLURM_STEP_ID in the shell that salloc opens (SLURM_INTERACTIVE_STEP in slurm.h)."""
_OF_TASKS = frozenset(
    {"FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "LSF_PM_TASKID", "MV2_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
)  # fmt: skip
"""Variables of a process that a launcher of tasks has started, perhaps as the only one."""


def check_script(environ: Mapping[str, str], cluster: str = "auto") -> None:
    """Check that a process which no launcher started may train alone.

    Args:
        environ: the environment variables.
        cluster: the option of this name.

    Raises:
        ConfigError: variables describe several machines or processes, or are wrong; the message names them.
    """
    if cluster == "none" or "LOCAL_RANK" in environ:
        return
    found = find_allocation(environ, cluster)
    if found is None:
        check_shell(environ)
        return
    size = found.options.get("num_processes")
    if found.total > 1 or (size is not None and size.value > 1):
        sources = dict.fromkeys(described.source for described in found.options.values() if described.firm)
        raise ConfigError(
            f"this process was started without a launcher and would train alone in a job of several processes "
            f"({', '.join(sources)}): start the script with accel launch; {_WAY_OUT}"
        )


def check_shell(environ: Mapping[str, str]) -> None:
    """Check variables which tell that there are several machines, and not which of them this one is.

    These are the variables of a batch script or a shell of a job, and incomplete ones of containers. Variables that
    ``find_allocation`` understands are not checked.

    Raises:
        ConfigError: there are such variables; the message names them.
    """
    if "LOCAL_RANK" in environ:  # a rank
        return
    for name, machines, source, launcher in _jobs(environ):
        if machines > 1:
            raise ConfigError(
                f"this {name} job has {machines} machines ({source}), and only this one would be used: start accel "
                f"launch, or the script, with {launcher}; {_WAY_OUT}"
            )
    for name in MACHINE_RANKS:
        rank = read_int(environ, name)
        if rank:
            raise ConfigError(
                f"environment variable {name} is {rank}, but the number of machines is unknown; set NNODES (and "
                f"MASTER_ADDR, MASTER_PORT), or pass --num_machines, or unset it; {_WAY_OUT}"
            )
    for name in MACHINES:
        machines = read_int(environ, name, minimum=1) or 1
        if machines > 1:
            raise ConfigError(
                f"environment variable {name} is {machines}, but none of {', '.join(MACHINE_RANKS)} is set, so the "
                f"rank of this machine is unknown; set NODE_RANK, or unset {name}; {_WAY_OUT}"
            )


def _jobs(environ: Mapping[str, str]) -> Iterator[tuple[str, int, str, str]]:
    """Name, number of machines, source and launcher of the jobs whose script or shell this is."""
    if environ.keys() & _OF_TASKS:
        return
    if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) == _INTERACTIVE_STEP:
        for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            number = read_int(environ, name, minimum=1) or 1
            yield "Slurm", number, f"{name}={number}", "srun --ntasks-per-node=1"
    if environ.get("LSB_JOBID"):
        variable, hosts = hosts_of(environ)
        yield "LSF", len(hosts), variable, 'jsrun, or blaunch -z "$(hosts)"'
    mpirun = "mpirun (accel launch --mpirun_hostfile does)"
    file = environ.get("PBS_NODEFILE")
    if file and Path(file).is_file():  # in a container it may not exist
        hosts = read_whole(Path(file)).decode(errors="replace").split()
        yield "PBS", len(set(hosts)), f"PBS_NODEFILE={file}", mpirun
    if environ.get("PE_HOSTFILE"):
        number = read_int(environ, "NHOSTS", minimum=1) or 1
        yield "Grid Engine", number, f"NHOSTS={number}", mpirun
