"""The worlds in which tests run functions on several ranks."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState
from testkit import worlds


def test_a_free_port_is_kept_for_the_store_of_rank_0():
    port = worlds.free_port()
    # Nobody else gets it: neither by name nor as the local end of a connection.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_port_is_given_back_after_32_others():
    first = worlds.free_port()
    others = [worlds.free_port() for _ in range(31)]
    assert len({first, *others}) == 32
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", first))
        worlds.free_port()
        other.bind(("127.0.0.1", first))


def drawn():
    """The process, the ranks of its world, their sum, and a random number."""
    state = PartialState()
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), state.num_processes, total.item(), torch.rand(()).item()


def failed():
    raise ValueError(f"rank {PartialState().process_index} gives up")


def test_kept_ranks_run_functions_of_several_worlds_until_one_fails():
    with worlds.kept():
        first = worlds.run(drawn, 2)
        larger = worlds.run(drawn, 3)
        assert worlds.run(drawn, 2) == first
        assert [rank[0] for rank in larger[:2]] == [rank[0] for rank in first]
        assert [rank[1:3] for rank in larger] == [(3, 3.0)] * 3
        with pytest.raises(worlds.RankError, match="gives up"):
            worlds.run(failed, 2)
        others = worlds.run(drawn, 2)
        assert not {rank[0] for rank in others} & {rank[0] for rank in larger}
        apart = worlds.run(drawn, 2, environ={"ACCEL_LOG_LEVEL": "info"})
        assert not {rank[0] for rank in others} & {rank[0] for rank in apart}
        assert worlds.run(drawn, 2) == others


def test_ranks_are_kept_only_where_it_was_asked_for():
    assert not {rank[0] for rank in worlds.run(drawn, 2)} & {rank[0] for rank in worlds.run(drawn, 2)}
