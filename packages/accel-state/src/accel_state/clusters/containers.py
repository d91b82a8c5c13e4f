"""One container per machine, with plain variables: NNODES and NODE_RANK, or WORLD_SIZE and RANK of the containers."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.allocation import Allocation, Described, Scheduler
from accel_state.clusters.base import DEFAULT_PORT, read_int, read_port
from accel_state.errors import ConfigError

__all__ = ["Containers"]

_MACHINES = ("NNODES", "NUM_NODES")


class Containers(Scheduler):
    """NODE_RANK with NNODES (or NUM_NODES), or RANK with WORLD_SIZE and without LOCAL_RANK.

    In the first form WORLD_SIZE, if it is set, counts the processes of all machines. In the second form every container
    has one RANK, and WORLD_SIZE counts the containers.
    """

    key = "containers"
    name = "the containers' variables"
    hint = "set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class."""
        name = next((name for name in _MACHINES if environ.get(name)), None)
        machines = None if name is None else read_int(environ, name, minimum=1)
        if name is not None and machines is not None and environ.get("NODE_RANK"):
            return self._by_node(environ, name, machines)
        size = read_int(environ, "WORLD_SIZE", minimum=1)
        rank = None if size is None else read_int(environ, "RANK", below=("WORLD_SIZE", size))
        if size is None or size == 1 or rank is None:
            return None
        options = {
            "num_machines": Described(size, f"WORLD_SIZE={size}"),
            "machine_rank": Described(rank, f"RANK={rank}"),
            **_address(environ),
        }
        return Allocation(self.name, "machine", rank, size, options, joins=True)

    def _by_node(self, environ: Mapping[str, str], name: str, machines: int) -> Allocation | None:
        rank = read_int(environ, "NODE_RANK", below=(name, machines))
        if machines == 1 or rank is None:
            return None
        options = {
            "num_machines": Described(machines, f"{name}={machines}"),
            "machine_rank": Described(rank, f"NODE_RANK={rank}"),
            **_address(environ),
        }
        per = None
        size = read_int(environ, "WORLD_SIZE", minimum=1)
        if size is not None:
            if size % machines:
                raise ConfigError(
                    f"environment variable WORLD_SIZE is {size}, which {name}={machines} does not divide; with "
                    "NODE_RANK it counts the processes of all machines. Correct or unset it"
                )
            per = Described(size // machines, f"WORLD_SIZE={size} with {name}={machines}")
        return Allocation(self.name, "machine", rank, machines, options, per)


def _address(environ: Mapping[str, str]) -> dict[str, Described]:
    found = {
        "main_process_port": Described(read_port(environ) or DEFAULT_PORT, "MASTER_PORT", firm=False),
    }
    if environ.get("MASTER_ADDR"):
        found["main_process_ip"] = Described(environ["MASTER_ADDR"], "MASTER_ADDR", firm=False)
    return found
