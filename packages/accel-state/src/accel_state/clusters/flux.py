"""Flux: scripts and launchers started by ``flux run`` or ``flux submit``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from accel_state.clusters.allocation import TaskScheduler
from accel_state.clusters.base import (
    TaskCluster,
    Topology,
    read_int,
    read_task,
)
from accel_state.clusters.slurm import first_host

__all__ = ["Flux", "FluxJobs"]

_PATIENCE = 20.0


class Flux(TaskCluster):
    """The process is one of several tasks of a job. Variables: flux-environment(7)."""

    name = "flux"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class. The address of rank 0 is MASTER_ADDR, or the first host that ``flux hostlist`` prints."""
        world_size = read_int(environ, "FLUX_JOB_SIZE", minimum=1)
        if world_size is None or world_size == 1 or "FLUX_TASK_RANK" not in environ:
            return None
        size, advice = ("FLUX_JOB_SIZE", world_size), "flux run, or unset the variables of Flux"
        rank, local_rank = read_task(environ, size, "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", advice)
        num_nodes = read_int(environ, "FLUX_JOB_NNODES", minimum=1) or 1
        local_world_size = max(-(-world_size // num_nodes), local_rank + 1)
        return self.topology(
            environ,
            (rank, world_size),
            (local_rank, local_world_size),
            nodes=(None, num_nodes),
            host=lambda: _first_host(environ),
            job=environ.get("FLUX_JOB_ID", ""),
        )


class FluxJobs(TaskScheduler):
    """A task of a Flux job."""

    key = "flux"
    name = "Flux"
    hint = "start it with flux run or flux submit, with several tasks"
    cluster = Flux()

    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """See the base class."""
        return {
            "size": f"FLUX_JOB_SIZE={topology.world_size}",
            "nodes": f"FLUX_JOB_NNODES={topology.num_nodes}",
            "node": f"FLUX_TASK_RANK={topology.rank}",
            "address": "flux hostlist",
        }


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
