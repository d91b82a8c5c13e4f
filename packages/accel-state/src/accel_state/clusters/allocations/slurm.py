"""Slurm: ``srun accel launch …``, with one task per machine or one per rank.

Variables: the manual page of srun, "Output environment variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocations.base import Allocation, Described, Scheduler
from accel_state.clusters.base import Topology
from accel_state.clusters.slurm import Slurm

__all__ = ["SlurmSteps"]


class SlurmSteps(Scheduler):
    """A task of a job step. Several tasks on one machine are ranks; a single one is that machine's launcher."""

    key = "slurm"
    name = "Slurm"
    hint = "start it with srun, with several tasks"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. The topology of the tasks is read as ranks read it."""
        topology = Slurm().detect(environ)
        if topology is None:
            return None
        by_rank = topology.world_size > topology.num_nodes
        return of_tasks(self.name, topology, by_rank, _sources(environ))


def of_tasks(name: str, topology: Topology, by_rank: bool, sources: Mapping[str, str]) -> Allocation:
    """The allocation for tasks with the topology that their own processes would read.

    Args:
        name: name of the scheduler in messages.
        topology: the tasks.
        by_rank: every task is a rank, not a launcher of a machine.
        sources: the variables of ``size``, ``nodes`` and ``node``, with their texts.
    """
    if by_rank:
        size = Described(topology.world_size, sources["size"])
        return Allocation(
            name, "rank", topology.rank, topology.world_size, {"num_processes": size}, joins=True
        )
    options = {
        "num_machines": Described(topology.num_nodes, sources["nodes"]),
        "machine_rank": Described(topology.node_rank, sources["node"]),
        "main_process_port": Described(topology.master_port, "the job's number", firm=False),
    }
    if topology.master_addr is not None:
        source = sources.get("address", "MASTER_ADDR")
        options["main_process_ip"] = Described(topology.master_addr, source, firm=False)
    return Allocation(name, "machine", topology.node_rank, topology.num_nodes, options, joins=True)


def _sources(environ: Mapping[str, str]) -> dict[str, str]:
    names = {
        "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "node": ("SLURM_NODEID",),
        "address": ("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    }
    found = {}
    for what, candidates in names.items():
        name = next((name for name in candidates if environ.get(name)), candidates[0])
        found[what] = f"{name}={environ.get(name, '')}"
    return found
