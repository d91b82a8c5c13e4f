"""Transfers of weights between threads of one process, which count what they send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch

from accel_ckpt.transfer.plan import WeightMessage


class World:
    """What the ranks of a transfer share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size
        self.queues: dict[tuple[int, int], Queue[torch.Tensor]] = {
            (a, b): Queue() for a in range(size) for b in range(size)
        }


@dataclass
class _Landing:
    queue: Queue[torch.Tensor] | None
    into: torch.Tensor | None

    def wait(self) -> None:
        if self.queue is not None and self.into is not None:
            self.into.copy_(self.queue.get(timeout=20))


class ThreadTransport:
    """A rank of a transfer in a thread; `sent` has the sizes of its messages by receiver."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = self.local_rank = rank
        self.world_size = world.size
        self.sent: list[tuple[int, int]] = []
        self.buckets: list[torch.Tensor] = []
        self.exchanges = 0

    def exchange(self, value: Any) -> list[Any]:
        self.exchanges += 1
        self.world.values[self.rank] = value
        self.world.barrier.wait()
        found = list(self.world.values)
        self.world.barrier.wait()
        return found

    def open(self, bucket_bytes: int) -> None:
        self.buckets = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(2)]

    def bucket(self, slot: int) -> torch.Tensor:
        return self.buckets[slot]

    def send(self, slot: int, message: WeightMessage) -> _Landing:
        self.sent.append((message.receiver, message.nbytes))
        copy = self.buckets[slot][: message.nbytes].clone()
        self.world.queues[self.rank, message.receiver].put(copy)
        return _Landing(None, None)

    def receive(self, slot: int, message: WeightMessage) -> _Landing:
        queue = self.world.queues[message.sender, self.rank]
        return _Landing(queue, self.buckets[slot][: message.nbytes])


def run(size: int, function: Callable[[ThreadTransport], Any]) -> list[Any]:
    """Call a function with each rank's transport, all at once; results, or exceptions, in rank order."""
    world = World(size)

    def guarded(rank: int) -> Any:
        try:
            return function(ThreadTransport(world, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(guarded, range(size)))


class Trainers:
    """The ranks of the training among those of a transfer: the first `count` of them."""

    def __init__(self, transport: Any, count: int) -> None:
        self.rank = self.local_rank = transport.rank
        self.world_size = count
        self._transport = transport

    def exchange(self, value: Any) -> list[Any]:
        """All ranks of the transfer must call it; what receivers say is left out."""
        return list(self._transport.exchange(value))[: self.world_size]
