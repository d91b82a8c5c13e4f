"""The first message of every collective: one small block per rank, of the same size whatever the call is.

A block holds a fingerprint of the call and, if it fits, the data of this rank. With gloo it goes from every rank to
every other directly: the all-gather of gloo passes two messages per rank around a ring, which costs a multiple of the
processor time. In a group of many ranks the first collects the blocks and sends all of them on: two messages per rank,
whatever their number. In a group of hundreds it collects headers alone and sends on their minimum and maximum, so that
what a rank receives does not grow with the group; data follows only where a call has some.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
)

from accel_state.communication.serialization import aligned
from accel_state.communication.torch_collectives import all_gather_single, hold_outside_python

__all__ = ["BlockPlan", "Blocks"]

_HEADER = struct.Struct("<Qqqq")
"""Fingerprint, bytes of payload, flags, mark. A payload starts at a multiple of the largest item size."""
_FIELDS = 4
_DIRECT = 8
"""Ranks up to which each sends to every other. 8 ranks of one machine take 0.7 of the processor time that way, 16 take
1.5 times as much."""
_TOGETHER = 128
"""Ranks up to which all blocks together take 64 kB, and travel with their payloads."""

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
_LARGEST: Any = AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX


class Blocks:
    """The blocks of one group, and the memory that they are sent from and to.

    Args:
        group: the process group that transfers them.
        backend: the group's backend for tensors in host memory.

    Attributes:
        capacity: bytes of payload that fit into a block.
        row: this rank's block, uint8.
        table: the blocks of all ranks, uint8, (ranks, bytes of a block); in a large group their headers, on the first.
        payloads: their payloads.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._group: Any = group
        self._all_to_all = (
            getattr(group, "all_to_all_single", None) or group.alltoall_base
        )  # before torch 2.13
        self._ranks = ranks = group.size()
        together = ranks <= _TOGETHER
        block = max(512, min(4096, 65536 // ranks // 16 * 16)) if together else _HEADER.size
        self.capacity = block - _HEADER.size
        self._bytes = bytearray(block)
        self.row = torch.frombuffer(self._bytes, dtype=torch.uint8)
        first = group.rank() == 0
        self.table = torch.zeros((ranks if together or first else 0, block), dtype=torch.uint8, device="cpu")
        self.payloads = self.table[:, _HEADER.size :]
        self._payload = self.row[_HEADER.size :]
        self._headers = self.table.view(torch.int64)[:, :_FIELDS]
        self._bounds = torch.zeros((2, _FIELDS), dtype=torch.int64, device="cpu")
        mine = self.row.view(torch.int64)[:_FIELDS]
        self._my_header = mine.expand_as(self._headers if together else self._bounds)
        self._copies = torch.zeros_like(self.table)
        self._places = list(self.table.unbind()) if first else []
        self._kept = hold_outside_python(self.row, self.table, self._copies, self._bounds, *self._places)
        # Functions and not methods, which would hold this object, and so the group, until the garbage collector runs.
        self._send: Callable[[Blocks, Wait], None] = (
            Blocks._by_all_gather if together else Blocks._by_reduction
        )
        if backend == "gloo":
            self._send = (
                Blocks._directly if ranks <= _DIRECT
                else Blocks._by_way_of_the_first if together
                else Blocks._bounds_from_the_first
            )  # fmt: skip

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
        if tensors is None or offset > self.capacity or not copyable or not self.capacity:
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

    def write(self, fingerprint: int, size: int, flags: int, mark: int = 0) -> None:
        """Write this rank's header.

        Args:
            fingerprint: the fingerprint of the call.
            size: bytes of the payload.
            flags: further facts that ranks must know; 0: none.
            mark: a number that is compared and may differ.
        """
        _HEADER.pack_into(self._bytes, 0, fingerprint, size, flags, mark)

    def exchange(self, wait: Wait) -> None:
        """Send this rank's block to all ranks, or in a large group its header to the first.

        Args:
            wait: waits for a work.
        """
        self._send(self, wait)

    def exchange_by(
        self, all_gather: Callable[[Tensor, Tensor], None], largest: Callable[[Tensor], Tensor]
    ) -> None:
        """Exchange blocks in a group that has no backend for tensors in host memory.

        Args:
            all_gather: fills a table with a row of each rank.
            largest: returns the largest of the numbers of all ranks, one by one.
        """
        if self.capacity:
            all_gather(self.table, self.row)
        else:
            self._take_bounds(largest(self._bounds_of_one()))

    def agree(self) -> bool:
        """Whether the headers of all ranks are equal."""
        if self.capacity:
            return torch.equal(self._headers, self._my_header)
        least, greatest = self._limits()
        return least == greatest

    def same_call(self) -> bool:
        """Whether all ranks make the same call, whatever the sizes of their payloads and their marks are."""
        least, greatest = self._limits()
        return least[0] == greatest[0] and not greatest[2]

    def same_mark(self) -> bool:
        """Whether all ranks have written the same mark."""
        least, greatest = self._limits()
        return least[3] == greatest[3]

    def same_size(self) -> bool:
        """Whether the payloads of all ranks have the same size."""
        least, greatest = self._limits()
        return least[1] == greatest[1]

    def largest(self) -> int:
        """Bytes of the largest payload."""
        return self._limits()[1][1]

    def sizes(self) -> list[int] | None:
        """Bytes of the payload of every rank; None in a large group, where none knows all."""
        if not self.capacity:
            return None
        found: list[int] = self._headers[:, 1].tolist()
        return found

    def _limits(self) -> tuple[list[int], list[int]]:
        """The least and the greatest fingerprint, size, flags and mark of all ranks."""
        if self.capacity:
            self._bounds[0], self._bounds[1] = torch.aminmax(self._headers, dim=0)
        least, greatest = self._bounds.tolist()
        return least, greatest

    def _bounds_of_one(self) -> Tensor:
        """What, where the largest of all ranks is taken, gives both bounds."""
        header = self.row.view(torch.int64)
        return torch.cat([~header, header])

    def _take_bounds(self, largest: Tensor) -> None:
        self._bounds.copy_(largest.view(2, -1))
        self._bounds[0].bitwise_not_()

    def _directly(self, wait: Wait) -> None:
        self._copies.copy_(self.row)
        wait(self._all_to_all(self.table, self._copies, [], [], _TO_ALL))

    def _by_way_of_the_first(self, wait: Wait) -> None:
        wait(self._group.gather([self._places] if self._places else [], [self.row], _TO_FIRST))
        wait(self._group.broadcast([self.table], _FROM_FIRST))

    def _bounds_from_the_first(self, wait: Wait) -> None:
        self._bounds.copy_(self._my_header)  # in a rehearsal no first rank says more
        wait(self._group.gather([self._places] if self._places else [], [self.row], _TO_FIRST))
        if self._places:
            self._bounds[0], self._bounds[1] = torch.aminmax(self._headers, dim=0)
        wait(self._group.broadcast([self._bounds], _FROM_FIRST))

    def _by_reduction(self, wait: Wait) -> None:
        both = self._bounds_of_one()
        self._kept_alive = hold_outside_python(both)
        wait(self._group.allreduce([both], _LARGEST))
        self._take_bounds(both)

    def _by_all_gather(self, wait: Wait) -> None:
        wait(all_gather_single(self.table.view(-1), self.row, group=self._group, async_op=True))
