"""Transfers over a process group: the world of the training, or a group that trainers and receivers join themselves."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from accel_ckpt.errors import TransferError
from accel_ckpt.format import tagged_json
from accel_ckpt.format.reader import parse_json
from accel_ckpt.tensor_storage import as_bytes
from accel_ckpt.transfer.connection import Work
from accel_ckpt.transfer.plan import WeightMessage

__all__ = ["GroupTransport", "join_group"]

_TAG = 0x7766  # of messages of weights; other messages of the group may be under way
_MOST = 1 << 30  # bytes of a description: a thousand times that of a large model


def join_group(
    host: str, port: int, rank: int, world_size: int, *, backend: str = "gloo", timeout: float = 300.0
) -> dist.ProcessGroup:
    """Make a group of processes that share no world, such as a training and its inference engines. Collective.

    It needs no default group, and does not change it. Every process that reaches the port can join, so use a private
    network.

    Args:
        host: where rank 0 runs, as the others reach it.
        port: a free port there.
        rank: of this process in the new group.
        world_size: number of its processes.
        backend: ``"gloo"``, or ``"nccl"`` for weights on CUDA devices.
        timeout: seconds to wait for the others, then and in every message.

    Raises:
        TransferError: the others did not come in time.
        ValueError: the backend is unknown.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(
            f"backend={backend!r} is unknown; give 'gloo', or 'nccl' for weights on CUDA devices"
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError(
            "backend='nccl' needs a build of torch with CUDA, and this one has none; give 'gloo'"
        )
    patience = timedelta(seconds=timeout)
    c10d: Any = dist  # torch declares neither its stores nor the constructors of groups as public
    try:
        store = c10d.PrefixStore(
            "accel_ckpt.transfer", c10d.TCPStore(host, port, world_size, rank == 0, patience)
        )
        if backend == "gloo":
            return cast(dist.ProcessGroup, c10d.ProcessGroupGloo(store, rank, world_size, patience))
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = patience
        return cast(dist.ProcessGroup, c10d.ProcessGroupNCCL(store, rank, world_size, options))
    except (dist.DistError, RuntimeError) as error:
        raise TransferError(
            f"rank {rank} could not join the group of {world_size} processes at {host}:{port}: {error}. Start all of "
            "them, with ranks from 0"
        ) from error


class GroupTransport:
    """The ranks of a process group send each other messages of raw bytes.

    Args:
        group: a group that holds all trainers and receivers; by default the default group. One of `join_group`, or of
            ``torch.distributed.new_group``.
        device: where buckets are: ``"cpu"`` for gloo, the device of this rank for NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise TransferError(
                "there is no process group; call init_process_group() or create an Accelerator first, or pass the "
                "group of join_group()"
            )
        self._group: Any = found
        self._device = torch.device(device)
        self._buckets: list[torch.Tensor] = []
        self.rank = self._group.rank()
        self.world_size = self._group.size()
        self.local_rank = self.rank

    def exchange(self, value: Any) -> list[Any]:
        """Send plain data to all ranks as JSON; reading it runs no code. Collective.

        Raises:
            TransferError: what a rank sent is no plain data, or a rank is gone.
        """
        data = json.dumps(tagged_json.encode(value)).encode()
        try:
            sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
            if not 0 < max(sizes) <= _MOST:
                raise TransferError(
                    f"a rank announces a description of {max(sizes)} bytes; only {_MOST} are read"
                )
            row = torch.zeros(max(sizes), dtype=torch.uint8)
            row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            rows = self._gather(row)
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"a rank of the transfer is gone, or does not take part: {error}") from error
        return [
            tagged_json.decode(parse_json(bytes(as_bytes(row[:size])), f"the message of rank {rank}"))
            for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        own = values.to(self._device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        self._group.allgather([rows], [own]).wait()
        return [row.cpu() for row in rows]

    def open(self, bucket_bytes: int) -> None:
        """Make two buckets."""
        self._buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def bucket(self, slot: int) -> torch.Tensor:
        """The memory of one of the two buckets."""
        return self._buckets[slot]

    def send(self, slot: int, message: WeightMessage) -> Work:
        """Begin to send the first bytes of a bucket."""
        bucket = self._buckets[slot][: message.nbytes]
        return cast(Work, self._group.send([bucket], message.receiver, _TAG))

    def receive(self, slot: int, message: WeightMessage) -> Work:
        """Begin to receive a message into a bucket; a message of another size is an error."""
        bucket = self._buckets[slot][: message.nbytes]
        return cast(Work, self._group.recv([bucket], message.sender, _TAG))
