"""The worlds in which tests run functions on several ranks."""

import socket

import pytest
import torch.distributed as dist

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
