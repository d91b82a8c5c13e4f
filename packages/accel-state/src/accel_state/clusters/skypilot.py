"""SkyPilot: the ``run`` commands of a task run on every node. Variables: SkyPilot, "Environment Variables"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from accel_state.clusters.allocation import Allocation, Described, Scheduler
from accel_state.clusters.base import read_int, read_machine_rank, stable_port
from accel_state.errors import ConfigError

__all__ = ["NodeList", "SkyPilot"]


class NodeList(Scheduler):
    """A variable lists the addresses of the nodes; rank 0 runs on the first.

    Attributes:
        addresses: name of this variable.
        number: variable with the number of nodes; if it is not set, the list tells it.
        rank: variable with the index of this node.
        gpus: variable with the number of GPUs of each node.
        job: variable with the name of the run.
    """

    addresses: ClassVar[str]
    number: ClassVar[str]
    rank: ClassVar[str]
    gpus: ClassVar[str]
    job: ClassVar[str]

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class."""
        addresses = environ.get(self.addresses, "").split()
        machines = read_int(environ, self.number, minimum=1) or len(addresses)
        if machines < 2:
            return None
        if len(addresses) != machines:
            raise ConfigError(
                f"environment variable {self.number} is {machines}, but {self.addresses} lists {len(addresses)} "
                "addresses; correct them, or pass --cluster none and --num_machines"
            )
        rank = read_machine_rank(environ, self.rank, (self.number, machines))
        gpus = read_int(environ, self.gpus)
        return self.of_machines(
            (machines, f"{self.number}={machines}"),
            (rank, f"{self.rank}={rank}"),
            (addresses[0], self.addresses),
            (stable_port(environ.get(self.job, "")), self.job),
            per=Described(gpus, f"{self.gpus}={gpus}", firm=False) if gpus else None,
        )


class SkyPilot(NodeList):
    """SKYPILOT_NODE_IPS lists several nodes. SKYPILOT_NUM_NODES is newer than the list."""

    key = "skypilot"
    name = "SkyPilot"
    hint = "start it in the run section of a task with num_nodes above 1"
    addresses = "SKYPILOT_NODE_IPS"
    number = "SKYPILOT_NUM_NODES"
    rank = "SKYPILOT_NODE_RANK"
    gpus = "SKYPILOT_NUM_GPUS_PER_NODE"
    job = "SKYPILOT_TASK_ID"
