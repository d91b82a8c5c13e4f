"""Large files, block by block: while one block is on its way to the disk, the next is filled and hashed."""

from __future__ import annotations

import errno
import mmap
import threading
from typing import Any

import numpy as np
import xxhash

from accel_ckpt.disk import Disk

__all__ = ["BLOCK", "BlockStream"]

BLOCK = 1 << 24
"""Bytes written at a time. A file of at least one block is written past the page cache, where that is possible."""

# Bytes copied, and then hashed, at a time: few enough to be in a core's cache still for the hash, and enough for
# the interpreter's lock to change hands rarely while training continues.
_PIECE = 1 << 22


class BlockStream:
    """Writes a new file from its beginning.

    Writing past the page cache (``O_DIRECT``) takes a tenth of the processor time and is nearer to the disk's rate
    than writing through it. It asks for aligned memory, so what is given to :meth:`write` is copied to one of two
    blocks of this object first, which also makes it safe to change it once that has returned. What is in aligned
    memory already goes to :meth:`write_block`, which does not copy.
    """

    def __init__(self, descriptor: int, disk: Disk) -> None:
        self.size = 0
        self.hash = xxhash.xxh3_64()
        self._descriptor = descriptor
        self._disk = disk
        self._direct: bool | None = None  # not asked for yet
        self._block, self._spare = _aligned(), _aligned()
        self._filled = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, data: memoryview) -> None:
        """Take all of ``data``, which is contiguous."""
        source = np.frombuffer(data, np.uint8)
        self.size += len(source)
        while len(source):
            count = min(_PIECE, BLOCK - self._filled, len(source))
            piece: Any = self._block[self._filled : self._filled + count]
            np.copyto(piece, source[:count])
            self.hash.update(memoryview(piece))
            self._filled += count
            source = source[count:]
            if self._filled == BLOCK:
                self._send(memoryview(self._block))
                self._block, self._spare, self._filled = self._spare, self._block, 0

    def write_block(self, block: memoryview) -> None:
        """Take a block of whole pages that begins at a page. It must stay as it is until :meth:`finish` returns."""
        if self._filled:
            raise ValueError(
                f"{self._filled} bytes are waiting for more; only whole blocks may go before a block"
            )
        self.size += len(block)
        self._send(block)
        self.hash.update(block)

    def finish(self) -> None:
        """Return when everything is on the disk."""
        self._wait()
        if self._direct:
            self._direct = self._disk.set_direct(
                self._descriptor, False
            )  # the rest is no multiple of a sector
        self._write(memoryview(self._block[: self._filled]))
        self._disk.fsync(self._descriptor)

    def settle(self) -> None:
        """Wait until nothing is on its way any more; the file may be closed then."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _wait(self) -> None:
        self.settle()
        if self._failure is not None:
            raise self._failure

    def _send(self, block: memoryview) -> None:
        if self._direct is None:
            self._direct = self._disk.set_direct(self._descriptor, True)
        self._wait()
        thread = threading.Thread(target=self._write_apart, args=(block,), name="accel-write")
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._write(block)
        else:
            self._thread = thread

    def _write_apart(self, data: memoryview) -> None:
        try:
            self._write(data)
        except BaseException as error:  # raised again in the thread that writes the file
            self._failure = error

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._disk.write(self._descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # This file system wants another alignment, or none.
                self._direct = self._disk.set_direct(self._descriptor, False)


def _aligned() -> Any:
    """A block that starts at a page; its memory is taken as it is filled."""
    return np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
