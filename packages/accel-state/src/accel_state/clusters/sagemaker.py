"""Amazon SageMaker: one process on each machine of a training job that starts no launcher of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping

from accel_state.clusters.allocation import TaskScheduler
from accel_state.clusters.base import Cluster, Topology, read_int
from accel_state.errors import ConfigError

__all__ = ["SageMaker", "SageMakerHosts", "sagemaker_hosts"]

_PORT = 7777
"""As SageMaker's own scripts for torchrun."""


def sagemaker_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The machines of the job in an order that is the same on all; empty outside a SageMaker job.

    Raises:
        ConfigError: SM_HOSTS is not a JSON list of names.
    """
    text = environ.get("SM_HOSTS")
    if not text:
        return ()
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(f"environment variable SM_HOSTS is {text!r}; expected a JSON list of host names")
    return tuple(sorted(hosts, key=lambda host: (len(host), host)))  # algo-2 before algo-10


class SageMaker(Cluster):
    """SM_HOSTS has several machines: the variables of SageMaker's training containers."""

    name = "sagemaker"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class; requires SM_HOSTS and SM_CURRENT_HOST."""
        hosts = sagemaker_hosts(environ)
        if len(hosts) < 2:
            return None
        current = environ.get("SM_CURRENT_HOST", "")
        if current not in hosts:
            raise ConfigError(
                f"environment variable SM_CURRENT_HOST is {current!r}, which SM_HOSTS ({', '.join(hosts)}) does not "
                "name; set it to the name of this machine, or unset SM_HOSTS to run alone"
            )
        rank = hosts.index(current)
        return Topology(
            rank=rank,
            world_size=len(hosts),
            node_rank=rank,
            num_nodes=len(hosts),
            master_addr=environ.get("MASTER_ADDR") or hosts[0],
            master_port=read_int(environ, "MASTER_PORT", minimum=1) or _PORT,
            launcher=self.name,
        )


class SageMakerHosts(TaskScheduler):
    """A launcher on each machine of a training job."""

    key = "sagemaker"
    name = "SageMaker"
    hint = "start it in a training job with several instances"
    cluster = SageMaker()

    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """See the base class."""
        node = f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']}"
        return {"size": "SM_HOSTS", "nodes": "SM_HOSTS", "node": node, "address": "SM_HOSTS"}
