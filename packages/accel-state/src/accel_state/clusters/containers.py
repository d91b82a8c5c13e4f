"""One container per machine, with plain variables: a number of machines and an index, or WORLD_SIZE and RANK."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocation import Allocation, Described, Scheduler
from accel_state.clusters.base import DEFAULT_PORT, read_int, read_port
from accel_state.errors import ConfigError

__all__ = ["MACHINES", "MACHINE_RANKS", "Containers"]

MACHINES = ("NNODES", "NUM_NODES")
"""Variables with the number of machines."""

MACHINE_RANKS = ("NODE_RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
"""Variables with the index of this machine. The first is a user's or a manifest's. Kubernetes sets the second in the
pods of an Indexed Job (Kubernetes, "Jobs", completion mode), and so in those of a JobSet, and Volcano's plugin ``env``
sets the third. Both of these count from 0 and come without a number of machines."""


class Containers(Scheduler):
    """NNODES (or NUM_NODES) with one of ``MACHINE_RANKS``, or RANK with WORLD_SIZE and without LOCAL_RANK.

    In the first form WORLD_SIZE, if it is set, counts the processes of all machines. In the second form every container
    has one RANK, and WORLD_SIZE counts the containers; so do Kubeflow's training operator and Volcano's plugin
    ``pytorch``.
    """

    key = "containers"
    name = "the containers' variables"
    hint = "set NNODES, NODE_RANK (in an Indexed Job Kubernetes sets the index), MASTER_ADDR and MASTER_PORT"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class."""
        address = environ.get("MASTER_ADDR") or None, "MASTER_ADDR"
        port = read_port(environ) or DEFAULT_PORT, "MASTER_PORT"
        name = next((name for name in MACHINES if environ.get(name)), "")
        machines = read_int(environ, name, minimum=1)
        rank_name = next((name for name in MACHINE_RANKS if environ.get(name)), "")
        size = read_int(environ, "WORLD_SIZE", minimum=1)
        if machines is not None and rank_name:
            rank = read_int(environ, rank_name, below=(name, machines))
            if machines == 1 or rank is None:
                return None
            per = None
            if size is not None:
                if size % machines:
                    raise ConfigError(
                        f"environment variable WORLD_SIZE is {size}, which {name}={machines} does not divide; with "
                        f"{rank_name} it counts the processes of all machines. Correct or unset it"
                    )
                per = Described(size // machines, f"WORLD_SIZE={size} with {name}={machines}")
            found = (machines, f"{name}={machines}"), (rank, f"{rank_name}={rank}")
            return self.of_machines(*found, address, port, per=per)
        rank = None if size is None else read_int(environ, "RANK", below=("WORLD_SIZE", size))
        if size is None or size == 1 or rank is None:
            return None
        return self.of_machines(
            (size, f"WORLD_SIZE={size}"), (rank, f"RANK={rank}"), address, port, joins=True
        )
