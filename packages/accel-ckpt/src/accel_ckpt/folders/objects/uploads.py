"""Files that are uploaded while they are written: parts of several files on their way at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from accel_ckpt.disk import Disk
from accel_ckpt.errors import CheckpointError
from accel_ckpt.folders.objects.store import PART, Store, Upload, requests_at_once
from accel_ckpt.format.writer import BLOCK_HASHED

__all__ = ["UploadDisk"]


class UploadDisk(Disk):
    """Takes files that are written to one folder, in which nothing is made, and uploads them.

    A file is complete when its upload is, which :meth:`drain` waits for: ``fsync`` only says that no more will come, so
    that the next file begins while the last parts of this one are on their way. At most ``requests_at_once()`` parts of
    ``PART`` bytes are in memory, and one for each file that is being written.

    Args:
        store: where to.
        folder: names are relative to it.
        prefix: what object names begin with.
    """

    def __init__(self, store: Store, folder: Path, prefix: str = "") -> None:
        self._store, self._folder, self._prefix = store, folder, prefix
        self._pool = ThreadPoolExecutor(requests_at_once(), thread_name_prefix="accel-upload")
        self._room = threading.BoundedSemaphore(requests_at_once())
        self._numbers = itertools.count(1)
        self._open: dict[int, _Outgoing] = {}
        self._files: list[_Outgoing] = []

    def open_new(self, path: Path) -> int:
        """Begin a file."""
        name = path.relative_to(self._folder).as_posix()
        number = next(self._numbers)
        self._open[number] = _Outgoing(self._store, f"{self._prefix}{name}", name, self._pool, self._room)
        self._files.append(self._open[number])
        return number

    def set_direct(self, descriptor: int, direct: bool) -> bool:
        """Direct writes bypass the page cache of a disk, which uploads do not have."""
        return False

    def write(self, descriptor: int, data: memoryview) -> int:
        """Take all of ``data``."""
        self._open[descriptor].add(bytes(data))
        return len(data)

    def fsync(self, descriptor: int) -> None:
        """End the file; its last bytes are sent."""
        self._open[descriptor].finish()

    def close(self, descriptor: int) -> None:
        """Give the file up, if it is not finished."""
        self._open.pop(descriptor)

    def drain(self) -> None:
        """Return when every file is uploaded.

        Raises:
            CheckpointError: one could not be.
        """
        failures = [failure for file in self._files if (failure := file.settle()) is not None]
        if failures:
            raise failures[0]

    @property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """Checksums of the blocks of every finished file."""
        return {file.name: tuple(file.hashes) for file in self._files if file.finished}

    def discard(self) -> None:
        """Leave nothing of what was uploaded.

        Raises:
            CheckpointError: something could not be removed.
        """
        for file in self._files:
            file.settle()
        problems: list[CheckpointError] = []
        for file in self._files:
            try:
                file.discard()
            except CheckpointError as error:
                problems.append(error)
        self.release()
        if problems:
            raise problems[0]

    def give_up(self) -> None:
        """Drop what is not complete; objects that are stay."""
        for file in self._files:
            file.give_up()
        self.release()

    def release(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Outgoing:
    """A file that is being uploaded."""

    def __init__(
        self, store: Store, key: str, name: str, pool: ThreadPoolExecutor, room: threading.BoundedSemaphore
    ) -> None:
        self.name = name
        self.hashes: list[str] = []
        self.finished = False
        self._store, self._key, self._pool, self._room = store, key, pool, room
        self._upload: Upload | None = None
        self._held: list[bytes] = []
        self._held_size = self._size = 0
        self._sent: list[Future[None]] = []
        self._hash, self._hashed = xxhash.xxh3_64(), 0

    def add(self, data: bytes) -> None:
        """Take the next bytes; what fills a part is sent when more comes, so that a small file is one request."""
        if self._held_size >= PART:
            self._send()
        self._held.append(data)
        self._held_size += len(data)
        self._size += len(data)
        self._hash_blocks(memoryview(data))

    def finish(self) -> None:
        """Send the rest, and let the object appear when everything has arrived."""
        if self._hashed or not self._size:
            self.hashes.append(self._hash.hexdigest())
        if self._upload is None:
            data = self._take()
            self._submit(lambda: self._store.put(self._key, data))
        else:
            self._send()
            self._sent.append(self._pool.submit(self._complete, self._upload, list(self._sent)))
        self.finished = True

    def settle(self) -> BaseException | None:
        """Wait for what is on its way; returns what failed first."""
        failures = [sent.exception() for sent in self._sent]
        return next((failure for failure in failures if failure is not None), None)

    def give_up(self) -> None:
        """Drop the parts, unless the object is complete."""
        failed = self.settle() is not None
        if self._upload is not None and (failed or not self.finished):
            self._upload.abort()

    def discard(self) -> None:
        """Leave nothing of it."""
        self.give_up()
        if self.finished:
            self._store.delete([self._key])

    def _hash_blocks(self, data: memoryview) -> None:
        while data:
            piece = data[: BLOCK_HASHED - self._hashed]
            self._hash.update(piece)
            self._hashed += len(piece)
            if self._hashed == BLOCK_HASHED:
                self.hashes.append(self._hash.hexdigest())
                self._hash, self._hashed = xxhash.xxh3_64(), 0
            data = data[len(piece) :]

    def _take(self) -> bytes:
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held, self._held_size = [], 0
        return data

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._store.upload(self._key)
        upload, data, number = self._upload, self._take(), len(self._sent) + 1
        before = self._sent[-1] if upload.ordered and self._sent else None

        def send() -> None:
            if before is not None:
                before.result()  # it was submitted earlier, so a thread has it
            upload.send(number, data)

        self._submit(send)

    def _submit(self, call: Callable[[], None]) -> None:
        failed = next((f for f in self._sent if f.done() and f.exception() is not None), None)
        if failed is not None:
            failed.result()
        self._room.acquire()
        try:
            future = self._pool.submit(call)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        self._sent.append(future)

    def _complete(self, upload: Upload, parts: list[Future[None]]) -> None:
        for part in parts:
            part.result()
        upload.complete(self._size)
