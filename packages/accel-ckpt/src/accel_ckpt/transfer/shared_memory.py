"""Transfers between processes of one machine, through memory that they share.

Every rank keeps its two buckets in a file that others map. A file in `/dev/shm` is POSIX shared memory; elsewhere it is
memory that the system may write to the disk. What is in it is a header in JSON and the raw bytes of a message, with a
checksum over both. Nothing is unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from accel_ckpt.coordination import WorldCoordinator, run_together
from accel_ckpt.errors import CorruptCheckpointError, TransferError, UnsafeCheckpointError
from accel_ckpt.format.forms import check_form, checksum, natural
from accel_ckpt.format.reader import parse_json
from accel_ckpt.store_coordinator import StoreCoordinator
from accel_ckpt.tensor_storage import as_bytes
from accel_ckpt.transfer.connection import Work
from accel_ckpt.transfer.plan import Message
from accel_state.host.process_identity import has_ended, process_identity

__all__ = ["SharedMemoryTransport"]

_HEADER = 4096  # bytes of the header of a slot
_COUNTERS = struct.Struct("=QQI")
"""Messages that were put into the slot, messages that were taken from it, and the bytes of the JSON that follows."""
_FORM = {"to": natural, "number": natural, "nbytes": natural, "checksum": checksum}
_LOOK = 1.0  # seconds between two looks whether the other process still runs
_TRIES = 100  # readings of a message whose checksum is wrong, before it is refused


class SharedMemoryTransport:
    """The ranks of a transfer are processes of one user on one machine, and share memory.

    Args:
        folder: a folder for this transfer alone, the same for all ranks; created if it does not exist. In `/dev/shm`
            its files are in memory. It must belong to this user, and no other may write to it.
        rank: of this process in the transfer.
        world_size: number of processes, trainers and receivers together.
        timeout: seconds to wait for another process.

    Raises:
        TransferError: the folder was used by another transfer, or the other processes did not come in time.
        UnsafeCheckpointError: other users may write to the folder.
        ValueError: `rank` is none of `world_size` ranks.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, world_size: int, *, timeout: float = 300.0
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank={rank} is none of {world_size} ranks; give one from 0 to {world_size - 1}"
            )
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank
        self._patience = timeout
        self._folder = Path(folder)
        _make_private(self._folder)
        try:
            os.close(os.open(self._folder / f"rank-{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise TransferError(
                f"rank {rank} of a transfer was in {self._folder} before; give every transfer a new folder, such as "
                "tempfile.mkdtemp(dir='/dev/shm')"
            ) from None
        c10d: Any = dist  # torch does not declare its stores as public
        store = c10d.FileStore(str(self._folder / "store"), world_size)
        self._store = StoreCoordinator(store, WorldCoordinator(rank, world_size, rank), patience=timeout)
        self._segment: _Segment | None = None
        self._others: dict[int, _Segment] = {}
        self._people: list[Any] = self.exchange(process_identity())

    def exchange(self, value: Any) -> list[Any]:
        """Send plain data to all ranks as JSON; reading it runs no code. Collective."""
        return self._store.exchange(value)

    def open(self, bucket_bytes: int, senders: Collection[int]) -> None:
        """Make the shared memory of this rank's buckets, and map that of the ranks that send to it. Collective."""

        def path(rank: int) -> Path:
            return self._folder / f"buckets-{rank}"

        def make() -> None:
            self._segment = _Segment(_made(path(self.rank), bucket_bytes))

        def attach() -> None:
            self._others = {sender: _Segment(_mapped(path(sender))) for sender in senders}

        try:
            run_together(make, self, doing="making shared memory", error=TransferError)
            run_together(attach, self, doing="mapping shared memory", error=TransferError)
        finally:
            path(self.rank).unlink(
                missing_ok=True
            )  # the memory goes with the last process that has mapped it

    def bucket(self, slot: int) -> torch.Tensor:
        """The memory of one of the two buckets."""
        return self._own.data(slot)

    def send(self, slot: int, message: Message) -> Work:
        """Show a bucket to its receiver."""
        segment = self._own
        count = segment.put(slot, message)
        return _Wait(lambda: segment.counters(slot)[1] == count, self._give_up(message, message.receiver))

    def receive(self, slot: int, message: Message) -> Work:
        """Copy a message from its sender's memory, once it is there."""
        segment = self._others[message.sender]
        into = self._own.data(slot)[: message.nbytes]
        tries = 0

        def arrived() -> bool:
            nonlocal tries
            found = segment.find(message)
            if found is None:
                return False
            taken = segment.take(found, message, into)
            tries += not taken
            if tries > _TRIES:
                raise CorruptCheckpointError(
                    f"the message {message.number} of rank {message.sender} to rank {message.receiver} is damaged: its "
                    "checksum is wrong. Another process may have written to the shared memory"
                )
            return taken

        return _Wait(arrived, self._give_up(message, message.sender))

    @property
    def _own(self) -> _Segment:
        if self._segment is None:
            raise TransferError("the transport was not opened; make a WeightTransfer with it on all ranks")
        return self._segment

    def _give_up(self, message: Message, other: int) -> Callable[[float], str | None]:
        """Why to wait no longer for another rank, after some seconds; None: go on."""

        def reason(waited: float) -> str | None:
            if has_ended(self._people[other]):
                return f"rank {other} (process {self._people[other]['pid']}) has ended"
            if waited > self._patience:
                return (
                    f"rank {other} did not take part in the message {message.number} of rank {message.sender} to rank "
                    f"{message.receiver} within {self._patience:g} s"
                )
            return None

        return reason


@dataclass
class _Wait:
    """Waits by looking, because processes share no lock."""

    done: Callable[[], bool]
    give_up: Callable[[float], str | None]

    def wait(self) -> None:
        began = looked = time.monotonic()
        pause = 1e-5
        while not self.done():
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                reason = self.give_up(now - began)
                if reason is not None:
                    raise TransferError(reason)
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)


class _Found(NamedTuple):
    slot: int
    put: int
    header: dict[str, Any]


class _Segment:
    """Two buckets in shared memory: for each a header, then their bytes."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._size = (len(memory) - 2 * _HEADER) // 2

    def data(self, slot: int) -> torch.Tensor:
        """The bytes of a bucket."""
        if not self._size:
            return torch.empty(0, dtype=torch.uint8)
        begin = 2 * _HEADER + slot * self._size
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=self._size, offset=begin)

    def counters(self, slot: int) -> tuple[int, int, int]:
        """Messages that were put and taken, and the size of the header's JSON."""
        put, taken, size = _COUNTERS.unpack_from(self._memory, slot * _HEADER)
        return put, taken, size

    def put(self, slot: int, message: Message) -> int:
        """Announce the first bytes of a bucket; returns how many messages the slot has had."""
        header = {"to": message.receiver, "number": message.number, "nbytes": message.nbytes}
        seal = _checksum(header, self.data(slot)[: message.nbytes])
        text = json.dumps({**header, "checksum": seal}).encode()
        put, taken, _ = self.counters(slot)
        start = slot * _HEADER
        self._memory[start + _COUNTERS.size : start + _COUNTERS.size + len(text)] = text
        _COUNTERS.pack_into(self._memory, start, put, taken, len(text))
        self._memory[start : start + 8] = struct.pack("=Q", put + 1)  # last: now the receiver looks
        return put + 1

    def find(self, message: Message) -> _Found | None:
        """The slot that holds a message."""
        for slot in range(2):
            put, taken, size = self.counters(slot)
            if put == taken or size > _HEADER - _COUNTERS.size:
                continue
            start = slot * _HEADER + _COUNTERS.size
            header = _header(bytes(self._memory[start : start + size]))
            if header is not None and (header["to"], header["number"]) == (message.receiver, message.number):
                return _Found(slot, put, header)
        return None

    def take(self, found: _Found, message: Message, into: torch.Tensor) -> bool:
        """Copy a message; returns whether it is what was sent.

        The copy is checked, not the shared memory, which could change afterwards.

        Raises:
            TransferError: it has another size than planned.
        """
        header = found.header
        if header["nbytes"] != message.nbytes or message.nbytes > self._size:
            raise TransferError(
                f"rank {message.sender} sent {header['nbytes']} bytes as message {message.number}, and "
                f"{message.nbytes} were planned; all ranks need the same version of accel-ckpt"
            )
        into.copy_(self.data(found.slot)[: message.nbytes])
        seal = _checksum({key: header[key] for key in ("to", "number", "nbytes")}, into)
        if seal != header["checksum"]:
            return False
        start = found.slot * _HEADER + 8
        self._memory[start : start + 8] = struct.pack("=Q", found.put)
        return True


def _header(text: bytes) -> dict[str, Any] | None:
    """What a header says; None while it is being written."""
    try:
        header = parse_json(text, "a header in shared memory")
        check_form(header, _FORM, "a header in shared memory")
    except CorruptCheckpointError:
        return None
    found: dict[str, Any] = header
    return found


def _checksum(header: dict[str, int], data: torch.Tensor) -> str:
    digest = xxhash.xxh3_64(json.dumps(header).encode())
    digest.update(as_bytes(data))
    return digest.hexdigest()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise UnsafeCheckpointError(
            f"other users may write to {folder}, and so to the weights that are sent through it; give a folder of this "
            "user alone (mode 700), such as tempfile.mkdtemp(dir='/dev/shm')"
        )


def _made(path: Path, bucket_bytes: int) -> mmap.mmap:
    """New shared memory for two buckets, filled with zeros."""
    size = 2 * _HEADER + 2 * (-(-bucket_bytes // 64) * 64)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Takes the memory now: else a full /dev/shm ends the process with a signal when it is written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise TransferError(
            f"{path.parent} has no room for {size} bytes of shared memory: {error}. Make `bucket_bytes` smaller, or "
            "/dev/shm larger (docker run --shm-size)"
        ) from error
    finally:
        os.close(descriptor)


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
