"""LSF: ``jsrun``, the launcher of its job step manager, and ``blaunch`` with one launcher for each host.

Variables: IBM Spectrum LSF, "Environment variables set for job execution"; jsrun sets ``JSM_NAMESPACE_*``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from accel_state.clusters.allocation import Allocation, TaskScheduler
from accel_state.clusters.base import (
    TaskCluster,
    Topology,
    read_int,
    read_task,
    stable_port,
)
from accel_state.errors import ConfigError
from accel_state.whole_files import read_whole

__all__ = ["JobStepManager", "LSFJobs", "hosts_of"]

_FILES = ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")


class JobStepManager(TaskCluster):
    """JSM_NAMESPACE_SIZE is above 1."""

    name = "lsf"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class. Consecutive ranks share a host; their number per host is that of this host."""
        world_size = read_int(environ, "JSM_NAMESPACE_SIZE", minimum=1)
        if world_size is None or world_size == 1:
            return None
        size, advice = (
            ("JSM_NAMESPACE_SIZE", world_size),
            "jsrun, or unset the variables of its job step manager",
        )
        rank, local_rank = read_task(environ, size, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", advice)
        _, hosts = hosts_of(environ)
        # The batch script of a job with jsrun runs on a launch host, which comes first in the list and has no ranks.
        compute = hosts[1:] if len(hosts) > 1 else hosts
        local_world_size = read_int(environ, "JSM_NAMESPACE_LOCAL_SIZE", minimum=1)
        if local_world_size is None:
            local_world_size = max(-(-world_size // max(1, len(compute))), local_rank + 1)
        return self.topology(
            environ,
            (rank, world_size),
            (local_rank, local_world_size),
            host=lambda: next(iter(compute), None),
            job=environ.get("LSB_JOBID", ""),
        )


def hosts_of(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The hosts of an LSF job, each once, in LSF's order, and the variable that they come from.

    ``LSB_DJOB_RANKFILE`` names a file with a host per rank; ``LSB_MCPU_HOSTS`` is ``host1 4 host2 4``; ``LSB_HOSTS``
    repeats a host for each of its slots.

    Raises:
        ConfigError: the file cannot be read, or the list has another form.
    """
    for name in _FILES:
        if environ.get(name):
            try:
                words = read_whole(Path(environ[name])).decode(errors="replace").split()
            except OSError as error:
                raise ConfigError(
                    f"environment variable {name} is {environ[name]!r}, which cannot be read ({error.strerror})"
                ) from None
            return name, list(dict.fromkeys(words))
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words:
        if len(words) % 2 or not all(count.isdecimal() for count in words[1::2]):
            raise ConfigError(
                f"environment variable LSB_MCPU_HOSTS is {environ['LSB_MCPU_HOSTS']!r}; expected hosts, each with its "
                "number of slots: host1 4 host2 4"
            )
        return "LSB_MCPU_HOSTS", list(dict.fromkeys(words[::2]))
    return "LSB_HOSTS", list(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))


class LSFJobs(TaskScheduler):
    """A task of jsrun, or a launcher on each host of a job with several hosts."""

    key = "lsf"
    name = "LSF"
    hint = 'start it in a job with several hosts (bsub), on each host: jsrun, or blaunch -z "$(hosts)"'
    cluster = JobStepManager()

    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """See the base class."""
        size = f"JSM_NAMESPACE_SIZE={topology.world_size}"
        node = f"JSM_NAMESPACE_RANK={topology.rank}"
        return {"size": size, "nodes": size, "node": node, "address": "LSF's list of hosts"}

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. Without jsrun, this host is found by its name in LSF's list."""
        of_tasks = super().allocation(environ)
        # LSF_PM_TASKID numbers the tasks that blaunch starts. Without it this is the batch script, or a shell.
        if of_tasks is not None or not environ.get("LSB_JOBID") or not environ.get("LSF_PM_TASKID"):
            return of_tasks
        variable, hosts = hosts_of(environ)
        if len(hosts) < 2:
            return None
        name = socket.gethostname()
        index = next((i for i, host in enumerate(hosts) if host.split(".")[0] == name.split(".")[0]), None)
        if index is None:
            raise ConfigError(
                f"this host, {name}, is not among those of the LSF job, {', '.join(hosts)} (from {variable}), so its "
                "machine rank is unknown; pass --num_machines, --machine_rank and --main_process_ip with --cluster none"
            )
        port = stable_port(environ["LSB_JOBID"]), "LSB_JOBID"
        return self.of_machines((len(hosts), variable), (index, variable), (hosts[0], variable), port)
