"""The first message of every collective: one small block per rank, of the same size whatever the call is.

A block holds a fingerprint of the call and, if it fits, the data of this rank. With gloo it goes from every rank to
every other directly: the all-gather of gloo passes two messages per rank around a ring, which costs a multiple of the
processor time. In a group of many ranks the first collects the blocks and sends all of them on: two messages per rank,
whatever their number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions, GatherOptions

from accel_state.communication.serialization import aligned
from accel_state.communication.torch_collectives import all_gather_single, hold_outside_python

__all__ = ["BlockPlan", "Blocks"]

_HEADER = struct.Struct("<Qqq8x")
"""Fingerprint, bytes of payload, flags. A payload starts at a multiple of the largest item size."""
_FIELDS = 3
_DIRECT = 8
"""Ranks up to which each sends to every other. 8 ranks of one machine take 0.7 of the processor time that way, 16 take
1.5 times as much."""

_WITHOUT_COPY = frozenset(getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8))
"""Dtypes of less than a byte, which torch cannot copy."""

Wait = Callable[[dist.Work], None]


class BlockPlan(NamedTuple):
    """How tensors of some dtypes and shapes travel in the blocks; made once for all calls with such tensors.

    Attributes:
        fingerprint: the fingerprint of the calls.
        size: bytes of the tensors in a block.
        fits: whether they travel in the blocks; if not, these carry only the fingerprint.
        given: their places in this rank's block.
        got: their places in the blocks of all ranks, (ranks, *shape).
    """

    fingerprint: int
    size: int
    fits: bool
    given: list[Tensor]
    got: list[Tensor]


# Called on the group itself: what torch.distributed does around a call takes as long as sending a block.
_TO_ALL = AllToAllOptions()
_TO_FIRST = GatherOptions()
_TO_FIRST.rootRank = 0
_FROM_FIRST = BroadcastOptions()
_FROM_FIRST.rootRank = 0


class Blocks:
    """The blocks of one group, and the memory that they are sent from and to.

    Args:
        group: the process group that transfers them.
        backend: the group's backend for tensors in host memory.

    Attributes:
        capacity: bytes of payload that fit into a block.
        row: this rank's block, uint8.
        table: the blocks of all ranks, uint8, (ranks, bytes of a block).
        payloads: their payloads.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._group: Any = group
        self._all_to_all = (
            getattr(group, "all_to_all_single", None) or group.alltoall_base
        )  # before torch 2.13
        self._ranks = ranks = group.size()
        block = max(512, min(4096, 65536 // ranks // 16 * 16))
        self.capacity = block - _HEADER.size
        self._bytes = bytearray(block)
        self.row = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.table = torch.zeros((ranks, block), dtype=torch.uint8, device="cpu")
        self.payloads = self.table[:, _HEADER.size :]
        self._payload = self.row[_HEADER.size :]
        self._headers = self.table.view(torch.int64)[:, :_FIELDS]
        self._my_header = self.row.view(torch.int64)[:_FIELDS].expand_as(self._headers)
        self._copies = torch.zeros_like(self.table)
        self._places = list(self.table.unbind()) if group.rank() == 0 else []
        self._kept = hold_outside_python(self.row, self.table, self._copies, *self._places)
        # Functions and not methods, which would hold this object, and so the group, until the garbage collector runs.
        self._send: Callable[[Blocks, Wait], None] = Blocks._by_all_gather
        if backend == "gloo":
            self._send = Blocks._directly if ranks <= _DIRECT else Blocks._by_way_of_the_first

    def plan(self, fingerprint: int, tensors: Sequence[tuple[torch.dtype, torch.Size]] | None) -> BlockPlan:
        """A plan for tensors of these dtypes and shapes.

        Args:
            fingerprint: the fingerprint of the calls.
            tensors: dtypes and shapes; None: only the fingerprint travels in the blocks.
        """
        places = []
        offset = 0
        copyable = True
        for dtype, shape in tensors or ():
            places.append((dtype, shape, offset))
            offset += aligned(math.prod(shape) * dtype.itemsize)
            copyable = copyable and dtype not in _WITHOUT_COPY
        if tensors is None or offset > self.capacity or not copyable:
            return BlockPlan(fingerprint, 0, False, [], [])
        given, got = [], []
        for dtype, shape, start in places:
            count, first = math.prod(shape), start // dtype.itemsize
            inside = slice(first, first + count)
            given.append(self._payload.view(dtype)[inside].view(shape))
            got.append(self.payloads.view(dtype)[:, inside].view(self._ranks, *shape))
        return BlockPlan(fingerprint, offset, True, given, got)

    def put(self, payload: Tensor) -> None:
        """Write this rank's payload, uint8 and 1-D, unless it does not fit."""
        size = payload.numel()
        if 0 < size <= self.capacity:
            self._payload[:size] = payload

    def write(self, fingerprint: int, size: int, flags: int) -> None:
        """Write this rank's header.

        Args:
            fingerprint: the fingerprint of the call.
            size: bytes of the payload.
            flags: further facts that ranks must know; 0: none.
        """
        _HEADER.pack_into(self._bytes, 0, fingerprint, size, flags)

    def exchange(self, wait: Wait) -> None:
        """Send this rank's block to all ranks and fill ``table``.

        Args:
            wait: waits for a work.
        """
        self._send(self, wait)

    def agree(self) -> bool:
        """Whether the headers of all ranks are equal."""
        return torch.equal(self._headers, self._my_header)

    def same_call(self) -> bool:
        """Whether all ranks make the same call, whatever the sizes of their payloads are."""
        first = self._headers[0, 0].item()
        return all(mark == first and not flags for mark, _, flags in self._headers.tolist())

    def sizes(self) -> list[int]:
        """Bytes of the payload of every rank."""
        found: list[int] = self._headers[:, 1].tolist()
        return found

    def _directly(self, wait: Wait) -> None:
        self._copies.copy_(self.row)
        wait(self._all_to_all(self.table, self._copies, [], [], _TO_ALL))

    def _by_way_of_the_first(self, wait: Wait) -> None:
        wait(self._group.gather([self._places] if self._places else [], [self.row], _TO_FIRST))
        wait(self._group.broadcast([self.table], _FROM_FIRST))

    def _by_all_gather(self, wait: Wait) -> None:
        wait(all_gather_single(self.table.view(-1), self.row, group=self._group, async_op=True))
