"""LSF: scripts started by ``jsrun``, the launcher of its job step manager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from accel_state.clusters.base import (
    Cluster,
    Topology,
    node_placement,
    read_int,
    read_port,
    stable_port,
)
from accel_state.errors import ConfigError
from accel_state.whole_files import read_whole

__all__ = ["JobStepManager", "hosts_of"]

_FILES = ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")


class JobStepManager(Cluster):
    """JSM_NAMESPACE_SIZE is above 1."""

    name = "lsf"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class. Consecutive ranks share a host; their number per host is that of this host."""
        world_size = read_int(environ, "JSM_NAMESPACE_SIZE", minimum=1)
        if world_size is None or world_size == 1:
            return None
        rank = read_int(environ, "JSM_NAMESPACE_RANK", below=("JSM_NAMESPACE_SIZE", world_size))
        local_rank = read_int(environ, "JSM_NAMESPACE_LOCAL_RANK")
        if rank is None or local_rank is None:
            missing = "JSM_NAMESPACE_RANK" if rank is None else "JSM_NAMESPACE_LOCAL_RANK"
            raise ConfigError(
                f"environment variable JSM_NAMESPACE_SIZE is {world_size}, but {missing} is not set; start the script "
                "with jsrun, or unset the variables of its job step manager"
            )
        _, hosts = hosts_of(environ)
        # The batch script of a job with jsrun runs on a launch host, which comes first in the list and has no ranks.
        compute = hosts[1:] if len(hosts) > 1 else hosts
        local_world_size = read_int(environ, "JSM_NAMESPACE_LOCAL_SIZE", minimum=1)
        if local_world_size is None:
            local_world_size = max(-(-world_size // max(1, len(compute))), local_rank + 1)
        node_rank, num_nodes = node_placement(rank, world_size, local_world_size)
        host = compute[0] if compute and num_nodes > 1 else None
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            master_addr=environ.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else host),
            master_port=read_port(environ) or stable_port(environ.get("LSB_JOBID", "")),
            launcher=self.name,
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
