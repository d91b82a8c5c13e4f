"""torchrun, and all launchers that set the same variables."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.base import (
    Cluster,
    Topology,
    is_loopback,
    node_placement,
    read_first,
    read_int,
    read_port,
)
from accel_state.errors import ConfigError

__all__ = ["Torchrun"]


class Torchrun(Cluster):
    """RANK and WORLD_SIZE are set: torchrun, ``accel launch``, ``torch.distributed.launch``, Kubeflow, …"""

    name = "torchrun"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class; requires RANK and WORLD_SIZE, and infers missing local variables."""
        world_size = read_int(environ, "WORLD_SIZE", minimum=1)
        if world_size is None:
            return None
        rank = read_int(environ, "RANK", below=("WORLD_SIZE", world_size))
        if rank is None:
            return None
        addr, port = environ.get("MASTER_ADDR") or None, read_port(environ)
        local_rank = read_int(environ, "LOCAL_RANK")
        local_world_size = read_int(environ, "LOCAL_WORLD_SIZE", minimum=1)
        if local_world_size is None:
            local_world_size = _local_world_size(environ, world_size, local_rank, addr)
        local_rank = local_rank or 0
        if local_world_size > world_size:
            raise ConfigError(
                f"environment variable LOCAL_WORLD_SIZE is {local_world_size}, more than WORLD_SIZE, "
                f"{world_size}"
            )
        if local_rank >= local_world_size:
            raise ConfigError(
                f"environment variable LOCAL_RANK is {local_rank}, but LOCAL_WORLD_SIZE is {local_world_size}; "
                f"it must be between 0 and {local_world_size - 1}"
            )
        node_rank, num_nodes = node_placement(rank, world_size, local_world_size)
        given_rank = read_first(environ, ("GROUP_RANK", "NODE_RANK"))
        given_nodes = read_first(environ, ("GROUP_WORLD_SIZE", "NNODES"), minimum=1)
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank if given_rank is None else given_rank,
            num_nodes=num_nodes if given_nodes is None else given_nodes,
            master_addr=addr,
            master_port=port,
            launcher=self.name,
        )


def _local_world_size(
    environ: Mapping[str, str], world_size: int, local_rank: int | None, addr: str | None
) -> int:
    if local_rank is None:  # one process per container, as Kubeflow starts them
        return 1
    nodes = read_first(environ, ("GROUP_WORLD_SIZE", "NNODES"), minimum=1)
    if nodes is not None:
        return max(world_size // nodes, local_rank + 1)
    if is_loopback(addr):
        return world_size
    return local_rank + 1  # at least this many processes are on this node
