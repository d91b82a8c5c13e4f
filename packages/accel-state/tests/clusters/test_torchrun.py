"""Processes started by torchrun, or with its variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.clusters.topology import Topology, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "1234",
}


def test_torchrun():
    assert detect(TORCHRUN) == Topology(3, 4, 1, 2, 1, 2, "host-a", 1234, "torchrun")


@pytest.mark.parametrize(
    ("environ", "local_rank", "local_world_size"),
    [
        (
            {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1"},
            1,
            4,
        ),  # all ranks meet on this machine: all are here
        ({"MASTER_ADDR": "host-a"}, 0, 1),  # one process per container
        ({"MASTER_ADDR": "host-a", "LOCAL_RANK": "1", "NNODES": "2"}, 1, 2),
        ({"MASTER_ADDR": "host-a", "LOCAL_RANK": "1"}, 1, 2),
    ],
)
def test_local_size_is_worked_out_where_it_is_missing(environ, local_rank, local_world_size):
    topology = detect({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1", **environ})
    assert (topology.local_rank, topology.local_world_size) == (local_rank, local_world_size)


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_every_rank_of_a_torchrun_world_finds_its_place(nodes, per_node, data):
    world_size = nodes * per_node
    rank = data.draw(st.integers(0, world_size - 1))
    topology = detect(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }
    )
    assert topology.node_rank * per_node + topology.local_rank == topology.rank == rank
    assert topology.num_nodes == nodes
