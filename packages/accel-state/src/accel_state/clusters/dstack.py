"""dstack: the ``commands`` of a task run on every node.

Variables: dstack, "Environment variables"; its runner sets them (runner/internal/runner/executor/executor.go), for a
task of one node too.
"""

from __future__ import annotations

from accel_state.clusters.skypilot import NodeList

__all__ = ["Dstack"]


class Dstack(NodeList):
    """DSTACK_NODES_NUM is above 1. The first of DSTACK_NODES_IPS is also DSTACK_MASTER_NODE_IP."""

    key = "dstack"
    name = "dstack"
    hint = "start it in the commands of a task with nodes above 1"
    addresses = "DSTACK_NODES_IPS"
    number = "DSTACK_NODES_NUM"
    rank = "DSTACK_NODE_RANK"
    gpus = "DSTACK_GPUS_PER_NODE"
    job = "DSTACK_RUN_ID"
