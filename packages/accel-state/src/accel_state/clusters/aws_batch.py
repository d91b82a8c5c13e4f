"""AWS Batch: multi-node parallel jobs, whose container runs once on each node.

Variables: AWS Batch, "Environment variables" of multi-node parallel jobs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from accel_state.clusters.allocation import Allocation, Scheduler
from accel_state.clusters.base import read_int, read_machine_rank, stable_port

__all__ = ["AWSBatch"]

_NUMBER = "AWS_BATCH_JOB_NUM_NODES"
_INDEX = "AWS_BATCH_JOB_NODE_INDEX"
_MAIN = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


class AWSBatch(Scheduler):
    """AWS_BATCH_JOB_NUM_NODES is above 1. Jobs of an array are independent of each other, and are not read."""

    key = "aws_batch"
    name = "AWS Batch"
    hint = "start it in the containers of a multi-node parallel job"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. The main node gets rank 0, whatever its index; the others keep their order."""
        machines = read_int(environ, _NUMBER, minimum=1) or 1
        if machines == 1:
            return None
        index = read_machine_rank(environ, _INDEX, (_NUMBER, machines))
        main = read_int(environ, _MAIN, below=(_NUMBER, machines)) or 0
        rank = 0 if index == main else index + (index < main)
        # The main node does not have its own address. On the others the variable is never missing.
        here = (socket.gethostname(), "this host's name") if index == main else (None, _ADDRESS)
        # The job of node 3 is named JOB#3.
        job = environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
        return self.of_machines(
            (machines, f"{_NUMBER}={machines}"),
            (rank, f"{_INDEX}={index}, {_MAIN}={main}"),
            (environ[_ADDRESS], _ADDRESS) if environ.get(_ADDRESS) else here,
            (stable_port(job), "AWS_BATCH_JOB_ID"),
        )
