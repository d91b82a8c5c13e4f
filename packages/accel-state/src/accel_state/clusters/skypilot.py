"""SkyPilot: the ``run`` commands of a task run on every node. Variables: SkyPilot, "Environment Variables"."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocation import Allocation, Described, Scheduler
from accel_state.clusters.base import read_int, stable_port
from accel_state.errors import ConfigError

__all__ = ["SkyPilot"]


class SkyPilot(Scheduler):
    """SKYPILOT_NODE_IPS lists several nodes; the first is the head node, where rank 0 runs."""

    key = "skypilot"
    name = "SkyPilot"
    hint = "start it in the run section of a task with num_nodes above 1"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. SKYPILOT_NUM_NODES is newer than the list of addresses."""
        addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
        machines = read_int(environ, "SKYPILOT_NUM_NODES", minimum=1) or len(addresses)
        if machines < 2:
            return None
        if len(addresses) != machines:
            raise ConfigError(
                f"environment variable SKYPILOT_NUM_NODES is {machines}, but SKYPILOT_NODE_IPS lists "
                f"{len(addresses)} addresses; correct them, or pass --cluster none and --num_machines"
            )
        rank = read_int(environ, "SKYPILOT_NODE_RANK", below=("the number of nodes", machines))
        if rank is None:
            raise ConfigError(
                f"environment variable SKYPILOT_NODE_IPS lists {machines} nodes, but SKYPILOT_NODE_RANK is not set, so "
                "the rank of this machine is unknown; set it, or pass --cluster none and --machine_rank"
            )
        task = environ.get("SKYPILOT_TASK_ID", "")
        options = {
            "num_machines": Described(machines, f"SKYPILOT_NUM_NODES={machines}"),
            "machine_rank": Described(rank, f"SKYPILOT_NODE_RANK={rank}"),
            "main_process_ip": Described(addresses[0], "SKYPILOT_NODE_IPS", firm=False),
            "main_process_port": Described(stable_port(task), "SKYPILOT_TASK_ID", firm=False),
        }
        gpus = read_int(environ, "SKYPILOT_NUM_GPUS_PER_NODE", minimum=0)
        per = Described(gpus, f"SKYPILOT_NUM_GPUS_PER_NODE={gpus}", firm=False) if gpus else None
        return Allocation(self.name, "machine", rank, machines, options, per)
