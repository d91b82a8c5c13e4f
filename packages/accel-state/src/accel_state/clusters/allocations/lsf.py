"""LSF: ``jsrun accel launch …``, and ``blaunch`` with one launcher for each host.

Variables: IBM Spectrum LSF, "Environment variables set for job execution"; jsrun sets ``JSM_NAMESPACE_*``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from accel_state.clusters.allocations.base import Allocation, Described, Scheduler
from accel_state.clusters.allocations.slurm import of_tasks
from accel_state.clusters.base import stable_port
from accel_state.clusters.lsf import JobStepManager, hosts_of
from accel_state.errors import ConfigError

__all__ = ["LSFJobs"]


class LSFJobs(Scheduler):
    """A task of jsrun, or a launcher on each host of a job with several hosts."""

    key = "lsf"
    name = "LSF"
    hint = 'start it in a job with several hosts (bsub), on each host: jsrun, or blaunch -z "$(hosts)"'

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. Without jsrun, this host is found by its name in LSF's list."""
        topology = JobStepManager().detect(environ)
        if topology is not None:
            by_rank = topology.world_size > topology.num_nodes
            sources = {
                "size": f"JSM_NAMESPACE_SIZE={topology.world_size}",
                "nodes": f"JSM_NAMESPACE_SIZE={topology.world_size}",
                "node": f"JSM_NAMESPACE_RANK={topology.rank}",
                "address": "LSF's list of hosts",
            }
            return of_tasks(self.name, topology, by_rank, sources)
        # LSF_PM_TASKID numbers the tasks that blaunch starts. Without it this is the batch script, or a shell.
        if not environ.get("LSB_JOBID") or not environ.get("LSF_PM_TASKID"):
            return None
        variable, hosts = hosts_of(environ)
        if len(hosts) < 2:
            return None
        return _by_host(environ, variable, hosts)


def _by_host(environ: Mapping[str, str], variable: str, hosts: list[str]) -> Allocation:
    name = socket.gethostname()
    index = next((i for i, host in enumerate(hosts) if host.split(".")[0] == name.split(".")[0]), None)
    if index is None:
        raise ConfigError(
            f"this host, {name}, is not among those of the LSF job, {', '.join(hosts)} (from {variable}), so its "
            "machine rank is unknown; pass --num_machines, --machine_rank and --main_process_ip with --cluster none"
        )
    options = {
        "num_machines": Described(len(hosts), variable),
        "machine_rank": Described(index, variable),
        "main_process_ip": Described(hosts[0], variable, firm=False),
        "main_process_port": Described(stable_port(environ["LSB_JOBID"]), "LSB_JOBID", firm=False),
    }
    return Allocation("LSF", "machine", index, len(hosts), options)
