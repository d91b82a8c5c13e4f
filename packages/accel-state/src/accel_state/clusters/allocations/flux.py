"""Flux: ``flux run accel launch …``. Variables: flux-environment(7)."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocations.base import Allocation, Scheduler
from accel_state.clusters.allocations.slurm import of_tasks
from accel_state.clusters.flux import Flux

__all__ = ["FluxJobs"]


class FluxJobs(Scheduler):
    """A task of a Flux job. Several tasks on one node are ranks; a single one is that node's launcher."""

    key = "flux"
    name = "Flux"
    hint = "start it with flux run or flux submit, with several tasks"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class."""
        topology = Flux().detect(environ)
        if topology is None:
            return None
        sources = {
            "size": f"FLUX_JOB_SIZE={topology.world_size}",
            "nodes": f"FLUX_JOB_NNODES={topology.num_nodes}",
            "node": f"FLUX_TASK_RANK={topology.rank}",
            "address": "flux hostlist",
        }
        return of_tasks(self.name, topology, topology.world_size > topology.num_nodes, sources)
