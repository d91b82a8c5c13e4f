"""What a rank sends and receives: the counters of the kernel for each TCP connection of this process.

They count what gloo, torch's collectives and the store really send, headers included, and change nothing that they
measure. Linux only.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accel_state.communication.torch_collectives import issued

__all__ = [
    "FROM_FIRST",
    "GATHERED",
    "PAIRS",
    "REDUCED",
    "SENT",
    "STEP",
    "TO_FIRST",
    "Meter",
    "Traffic",
    "agreement",
    "regime_of",
    "steps",
]

# What gloo adds: to a message of an exchange in pairs, of an all-gather, of an all-reduce; to a rank's message to the
# first; to what the last rank gets of a broadcast, with and without a gather before it; and to the first in each step
# of a broadcast.
PAIRS, GATHERED, REDUCED, TO_FIRST, FROM_FIRST, SENT, STEP = 144, 288, 576, 96, 144, 96, 48


def regime_of(ranks: int) -> str:
    """How ranks agree in a world of this size."""
    return "up to 8" if ranks <= 8 else "up to 128" if ranks <= 128 else "above 128"


def steps(ranks: int) -> int:
    """Messages from a rank to another, one after the other, until all ranks have what the first sends."""
    return math.ceil(math.log2(ranks))


def agreement(regime: str, ranks: int, first: bool) -> int:
    """Bytes that a rank receives in an agreement: the check before a collective, with data of up to 4 kB.

    Args:
        regime: see `regime_of`.
        ranks: of the world.
        first: of the first rank, which pays most; False: of the last one.
    """
    if regime == "up to 8":
        return (ranks - 1) * (4096 + PAIRS)
    sent = STEP * steps(ranks)
    if regime == "above 128":
        return (ranks - 1) * (32 + TO_FIRST) + sent if first else 64 + FROM_FIRST
    size = max(512, min(4096, 65536 // ranks // 16 * 16))
    return (ranks - 1) * (size + TO_FIRST) + sent if first else ranks * size + FROM_FIRST


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
