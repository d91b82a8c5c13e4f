"""What a rank sends and receives: the counters of the kernel for each TCP connection of this process.

They count what gloo, torch's collectives and the store really send, headers included, and change nothing that they
measure. Linux only.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accel_state.communication.torch_collectives import issued

__all__ = ["Meter", "Traffic"]

_RECEIVED = struct.Struct("@128xQ")
"""tcpi_bytes_received of Linux's tcp_info."""


class Traffic(NamedTuple):
    """What an action costs a rank."""

    received: int
    """Bytes from other ranks."""
    collectives: int
    """Collectives that the backends were given."""
    from_store: int
    """Bytes that this rank received as a client of the store."""
    at_store: int
    """Bytes that the store received, on the rank that hosts it."""


class Meter:
    """Measures one action after the other, which all ranks do together.

    Args:
        rank: this rank.
        world: number of ranks.
        folder: shared by the ranks, which meet in it: that sends nothing.
    """

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self._rank, self._world, self._folder = rank, world, folder
        self._met = 0
        self._store = int(os.environ.get("MASTER_PORT", 0))

    def __call__(self, action: Callable[[], Any]) -> Traffic:
        """What an action costs."""
        before = self._quiet()
        action()
        after = self._quiet()
        return Traffic(*(now - then for now, then in zip(after, before, strict=True)))

    def _quiet(self) -> Traffic:
        """The counters when no rank is in an action."""
        self._meet()
        time.sleep(0.05)  # until the last bytes are counted
        found = self._counters()
        self._meet()
        return found

    def _meet(self) -> None:
        self._met += 1
        (self._folder / f"{self._met}-{self._rank}").touch()
        while len(list(self._folder.glob(f"{self._met}-*"))) < self._world:
            time.sleep(0.002)

    def _counters(self) -> Traffic:
        ranks = client = server = 0
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            try:
                if not stat.S_ISSOCK(os.stat(number).st_mode):
                    continue
                end = socket.socket(fileno=os.dup(number))
            except OSError:  # closed meanwhile
                continue
            with end:
                if end.type != socket.SOCK_STREAM or end.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                try:
                    here, there = end.getsockname()[1], end.getpeername()[1]
                except OSError:  # a listening one
                    continue
                [count] = _RECEIVED.unpack_from(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
                if here == self._store:
                    server += count
                elif there == self._store:
                    client += count
                else:
                    ranks += count
        import torch.distributed as dist

        begun = sum(issued().values()) if dist.is_initialized() else 0
        return Traffic(ranks, begun, client, server)
