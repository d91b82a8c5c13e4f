"""MPI launchers: Open MPI, MVAPICH, and those built on Hydra (MPICH, Intel MPI)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel_state.clusters.allocation import TaskScheduler
from accel_state.clusters.base import (
    TaskCluster,
    Topology,
    read_int,
)
from accel_state.clusters.sagemaker import sagemaker_hosts
from accel_state.errors import ConfigError

__all__ = ["MPI", "MPIProcesses"]


@dataclass(frozen=True, slots=True)
class _Names:
    rank: str
    size: str
    local_rank: str
    local_size: str


# Open MPI: documentation of mpirun, "Environment variables". MVAPICH2: user guide, MV2_COMM_WORLD_*.
# Hydra: PMI_* from the process manager interface, MPI_LOCAL* from its proxies. Cray's mpiexec, also under PBS: PMI_*.
_IMPLEMENTATIONS = (
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    _Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_JOB_NAMES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
)


class MPI(TaskCluster):
    """A size variable of an MPI launcher is above 1."""

    name = "mpi"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class. On one node the address of rank 0 is 127.0.0.1, with a port derived from the job name."""
        sizes = {names: read_int(environ, names.size, minimum=1) or 1 for names in _IMPLEMENTATIONS}
        found = [names for names, size in sizes.items() if size > 1]
        names = next(
            (names for names in found if environ.get(names.local_rank)), found[-1] if found else None
        )
        # Some kinds of srun --mpi set ranks and sizes alone: Slurm's own variables also tell the machines.
        if names is None or (
            not environ.get(names.local_rank)
            and environ.get("SLURM_LOCALID")
            and environ.get("SLURM_PROCID") == environ.get(names.rank)
        ):
            return None
        return self._of(environ, names, sizes[names])

    def _of(self, environ: Mapping[str, str], names: _Names, world_size: int) -> Topology:
        rank = read_int(environ, names.rank, below=(names.size, world_size))
        if rank is None:
            raise ConfigError(
                f"environment variable {names.size} is {world_size}, but {names.rank} is not set; "
                "start the script with mpirun, or unset both"
            )
        local_world_size = read_int(environ, names.local_size, minimum=1)
        local_rank = read_int(environ, names.local_rank)
        if local_rank is None:  # the process manager does not set it: assume that all ranks are on one node
            local_rank, local_world_size = rank, local_world_size or world_size
        local_world_size = local_world_size or local_rank + 1
        if local_rank >= local_world_size:
            raise ConfigError(
                f"environment variable {names.local_rank} is {local_rank}, but {names.local_size} is "
                f"{local_world_size}; it must be between 0 and {local_world_size - 1}"
            )
        return self.topology(
            environ,
            (rank, world_size),
            (local_rank, local_world_size),
            # SageMaker's library for data parallelism starts ranks with mpirun.
            host=lambda: next(iter(sagemaker_hosts(environ)), None),
            job=next((environ[name] for name in _JOB_NAMES if environ.get(name)), None),
        )


class MPIProcesses(TaskScheduler):
    """A process that mpirun has started. The address of rank 0 on another machine is MASTER_ADDR: mpirun sets none."""

    key = "mpi"
    name = "MPI"
    hint = "start it with mpirun, with several processes"
    cluster = MPI()

    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """See the base class."""
        return dict.fromkeys(("size", "nodes", "node"), f"the {topology.world_size} processes of mpirun")
