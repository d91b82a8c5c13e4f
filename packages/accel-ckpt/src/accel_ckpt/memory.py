"""Host memory: in huge pages, used again, and laid out as the files that it will become."""

from __future__ import annotations

import errno
import math
import mmap
from collections.abc import Iterator, Sequence

import torch

from accel_ckpt.blocks import BLOCK
from accel_ckpt.tensors import as_bytes

__all__ = ["FileImage", "HostBuffers", "empty_tensor", "new_bytes"]

# Bytes. Below it a page more or less does not matter.
_LARGE = 1 << 22


def new_bytes(nbytes: int) -> torch.Tensor:
    """So many bytes of new memory, as 1-D uint8, that begin at a page.

    The kernel is asked for huge pages: the first touch of new memory, page by page, takes longer than copying to it.
    """
    area = mmap.mmap(-1, nbytes)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and nbytes >= _LARGE:
        try:
            area.madvise(advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise
    return torch.frombuffer(area, dtype=torch.uint8)


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, of any values, in huge pages if it is large."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype)
    return new_bytes(nbytes).view(dtype).view(tuple(shape))


class HostBuffers:
    """Host memory that one save after the other copies to: new memory costs several times the copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """At least so many bytes, as 1-D uint8, that begin at a page; ``pinned`` for copies from an accelerator."""
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())  # few sizes, so that what is free fits
        free = self._free.get((size, pinned))
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else new_bytes(size)

    def give_back(self, buffer: torch.Tensor, pinned: bool) -> None:
        """Let the next save have it."""
        self._free.setdefault((buffer.nbytes, pinned), []).append(buffer)

    def clear(self) -> None:
        """Forget what is not in use."""
        self._free.clear()


class FileImage:
    """The content that a file will have, in blocks of memory that can be written past the page cache.

    Args:
        size: bytes of the file.
        buffers: where the memory comes from.
        pinned: for copies from an accelerator.
    """

    def __init__(self, size: int, buffers: HostBuffers, pinned: bool) -> None:
        self.size = size
        self._buffers = buffers
        self._pinned = pinned
        self._blocks = [buffers.take(min(BLOCK, size - at), pinned) for at in range(0, size, BLOCK)]

    def spans(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The memory of these bytes of the file, in order, as 1-D uint8."""
        while begin < end:
            number, at = divmod(begin, BLOCK)
            count = min(BLOCK - at, end - begin)
            yield self._blocks[number][at : at + count]
            begin += count

    def fill(self, begin: int, data: bytes) -> None:
        """Put bytes to a place of the file."""
        view = memoryview(data)
        for span in self.spans(begin, begin + len(data)):
            as_bytes(span)[:] = view[: len(span)]
            view = view[len(span) :]

    def blocks(self) -> Iterator[memoryview]:
        """The content, block by block."""
        yield from (as_bytes(span) for span in self.spans(0, self.size))

    def release(self) -> None:
        """Give the memory back."""
        while self._blocks:
            self._buffers.give_back(self._blocks.pop(), self._pinned)
