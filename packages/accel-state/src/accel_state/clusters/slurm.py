"""Slurm: scripts and launchers started by ``srun``, with one task per machine or one per rank.

Variables: the manual page of srun, "Output environment variables".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from accel_state.clusters.allocation import TaskScheduler
from accel_state.clusters.base import (
    TaskCluster,
    Topology,
    read_first,
    read_int,
    read_task,
)
from accel_state.errors import ConfigError

__all__ = ["Slurm", "SlurmSteps", "first_host", "tasks_per_node"]


class Slurm(TaskCluster):
    """The process is a task of a job step with several tasks.

    The ``sbatch`` script itself also has SLURM_PROCID and SLURM_NTASKS; it is one process, recognised by
    ENVIRONMENT=BATCH without SLURM_STEP_ID.
    """

    name = "slurm"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class; rank 0 is on the first node of the step, with a port derived from the job id."""
        if "SLURM_PROCID" not in environ:
            return None
        if "SLURM_STEP_ID" not in environ and environ.get("ENVIRONMENT") == "BATCH":
            return None
        size_name = next(
            (n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if n in environ), None
        )
        world_size = None if size_name is None else read_int(environ, size_name, minimum=1)
        if size_name is None or world_size is None or world_size == 1:
            return None
        size, advice = (size_name, world_size), "srun, or unset the variables of Slurm"
        rank, local_rank = read_task(environ, size, "SLURM_PROCID", "SLURM_LOCALID", advice)
        num_nodes = read_first(
            environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), minimum=1
        )
        node_rank = read_int(environ, "SLURM_NODEID")
        local_world_size = _local_world_size(environ, world_size, num_nodes or 1, node_rank or 0, local_rank)
        return self.topology(
            environ,
            (rank, world_size),
            (local_rank, local_world_size),
            nodes=(node_rank, num_nodes),
            host=lambda: _first_node(environ),
            job=_job(environ),
        )


class SlurmSteps(TaskScheduler):
    """A task of a job step."""

    key = "slurm"
    name = "Slurm"
    hint = "start it with srun, with several tasks"
    cluster = Slurm()

    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """See the base class."""
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


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list such as ``rack[1-2]n[003-005,7],login1``; here ``rack1n003``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node, from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ConfigError: the text does not have this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigError(f"{text!r} is not a Slurm list of tasks per node, such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _local_world_size(
    environ: Mapping[str, str], world_size: int, num_nodes: int, node_rank: int, local_rank: int
) -> int:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text:
        counts = tasks_per_node(text)
        if node_rank < len(counts) and counts[node_rank] > local_rank:
            return counts[node_rank]
    return max(-(-world_size // num_nodes), local_rank + 1)


def _first_node(environ: Mapping[str, str]) -> str | None:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodelist = next((environ[name] for name in names if environ.get(name)), "")
    return first_host(nodelist) or None


def _job(environ: Mapping[str, str]) -> str:
    step = environ.get("SLURM_STEP_ID", "0")
    return f"{environ.get('SLURM_JOB_ID') or environ.get('SLURM_JOBID', '')}.{step}"
