"""Flux: scripts started by ``flux run`` or ``flux submit``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from accel_state.clusters.base import (
    Cluster,
    Topology,
    node_placement,
    read_int,
    read_port,
    stable_port,
)
from accel_state.clusters.slurm import first_host
from accel_state.errors import ConfigError

__all__ = ["Flux"]

_PATIENCE = 20.0


class Flux(Cluster):
    """The process is one of several tasks of a job. Variables: flux-environment(7)."""

    name = "flux"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class. The address of rank 0 is MASTER_ADDR, or the first host that ``flux hostlist`` prints."""
        world_size = read_int(environ, "FLUX_JOB_SIZE", minimum=1)
        if world_size is None or world_size == 1 or "FLUX_TASK_RANK" not in environ:
            return None
        rank = read_int(environ, "FLUX_TASK_RANK", below=("FLUX_JOB_SIZE", world_size))
        local_rank = read_int(environ, "FLUX_TASK_LOCAL_ID")
        num_nodes = read_int(environ, "FLUX_JOB_NNODES", minimum=1) or 1
        if rank is None or local_rank is None:
            missing = "FLUX_TASK_RANK" if rank is None else "FLUX_TASK_LOCAL_ID"
            raise ConfigError(
                f"environment variable FLUX_JOB_SIZE is {world_size}, but {missing} is not set; start the script with "
                "flux run, or unset the variables of Flux"
            )
        local_world_size = max(-(-world_size // num_nodes), local_rank + 1)
        node_rank, _ = node_placement(rank, world_size, local_world_size)
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            master_addr=environ.get("MASTER_ADDR")
            or ("127.0.0.1" if num_nodes == 1 else _first_host(environ)),
            master_port=read_port(environ) or stable_port(environ.get("FLUX_JOB_ID", "")),
            launcher=self.name,
        )


def _first_host(environ: Mapping[str, str]) -> str | None:
    tool = shutil.which("flux", path=environ.get("PATH"))
    if tool is None:
        return None
    answer = subprocess.run(
        [tool, "hostlist", "local"],
        capture_output=True,
        text=True,
        env=dict(environ),
        check=False,
        timeout=_PATIENCE,
    )
    return first_host(answer.stdout) or None if answer.returncode == 0 else None
