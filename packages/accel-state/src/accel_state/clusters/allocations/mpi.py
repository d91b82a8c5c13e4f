"""MPI: ``mpirun accel launch …``. Every process is a rank, unless there is one on each of several machines."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocations.base import Allocation, Scheduler
from accel_state.clusters.allocations.slurm import of_tasks
from accel_state.clusters.mpi import MPI

__all__ = ["MPIProcesses"]


class MPIProcesses(Scheduler):
    """A process that mpirun has started."""

    key = "mpi"
    name = "MPI"
    hint = "start it with mpirun, with several processes"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. The address of rank 0 on another machine is MASTER_ADDR: mpirun does not set it."""
        topology = MPI().detect(environ)
        if topology is None:
            return None
        by_rank = topology.world_size > topology.num_nodes
        source = f"the {topology.world_size} processes of mpirun"
        return of_tasks(self.name, topology, by_rank, dict.fromkeys(("size", "nodes", "node"), source))
