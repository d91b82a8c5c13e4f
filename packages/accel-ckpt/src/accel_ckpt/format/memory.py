"""Host memory: reusable buffers, images of files that will be written, and mapped files."""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.errors import FileChangedError
from accel_ckpt.format.blocks import BLOCK
from accel_ckpt.tensor_storage import as_bytes, copy_values, is_plain_memory

__all__ = [
    "Arena",
    "FileImage",
    "HostBuffers",
    "MappedFile",
    "collector_paused",
    "copy_from_file",
    "evict",
    "map_file",
    "mapped_file_of",
    "new_bytes",
    "own_memory",
    "populate",
    "pread_into",
    "read_around",
    "trim_heap",
]

# Bytes that an arena takes at a time.
_ARENA = 1 << 26

_ALIGNMENT = 64  # bytes; as torch's allocator

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)

# mmap has no names for most of these, and on some systems for none.
_MADV_NORMAL = 0
_MADV_RANDOM = 1
_MADV_COLD = 20  # Linux 5.4
_MADV_PAGEOUT = 21  # Linux 5.4
_MADV_POPULATE_READ = 22  # Linux 5.14


def new_bytes(nbytes: int) -> torch.Tensor:
    """New memory of `nbytes` bytes, as 1-D uint8, that begins at a page."""
    return torch.frombuffer(_new_area(nbytes), dtype=torch.uint8)


def _new_area(nbytes: int) -> mmap.mmap:
    """Memory of this process alone. Python's default is shared with forks, which then train on one optimizer state.

    Huge pages take a third of the time to touch first on some machines, and five times as much on virtual ones, whose
    host brings such memory page by page.
    """
    with _explained(nbytes):
        return mmap.mmap(-1, nbytes) if sys.platform == "win32" else mmap.mmap(-1, nbytes, flags=_PRIVATE)


@contextmanager
def _explained(nbytes: int, path: Path | None = None) -> Iterator[None]:
    """Explain the error of a system that refuses to map memory.

    Args:
        nbytes: bytes of the mapping.
        path: the mapped file; None: new memory.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        what = "new memory" if path is None else "a file"
        raise OSError(
            errno.ENOMEM,
            f"{os.strerror(errno.ENOMEM)} for {nbytes:,} bytes of {what}. A limit of the process or of the system "
            "(ulimit -v, ulimit -d, vm.overcommit_memory=2) counts mapped files as if they were in memory. Raise it, "
            "or limit memory with a control group, which counts what is in memory",
            None if path is None else str(path),
        ) from error


class Arena:
    """New tensors on the CPU, several to a piece of memory, which goes when the last of them does."""

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of any values, with a storage of its own."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._area is None or self._used + nbytes > len(self._area):
            self._area, self._used = _new_area(max(_ARENA, nbytes)), 0
        found = torch.frombuffer(self._area, dtype=dtype, count=count, offset=self._used)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return found.view(tuple(shape))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor's values."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


class MappedFile(mmap.mmap):
    """A file mapped privately, for as long as a tensor views it: what is written to the views never reaches the file.

    Its descriptor stays open, so that a change of the mapped content can be distinguished from a new file
    of the same name.

    Raises:
        ValueError: the file has fewer bytes than ``size``.
    """

    path: Path
    _descriptor: int
    _fingerprint: tuple[int, int]
    _address: int

    def __new__(cls, path: Path, size: int) -> Self:
        """Map the first ``size`` bytes."""
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            with _explained(size, path):
                self = super().__new__(cls, descriptor, size, access=mmap.ACCESS_COPY)
        except BaseException:
            os.close(descriptor)
            raise
        self.path, self._descriptor = path, descriptor
        self._fingerprint = self._look()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        weakref.finalize(self, os.close, descriptor)
        address = self._address
        with _registering:
            _mappings[address] = self
            # Those that are gone may be within this one. Going through a weak dictionary fails while other threads
            # drop values of it.
            _begins[:] = sorted({begin for begin in (*_begins, address) if begin in _mappings})
        return self

    def read_into(self, address: int, into: memoryview) -> None:
        """Read the bytes that are mapped at an address to other memory.

        Raises:
            FileChangedError: the file has become shorter.
        """
        filled = 0
        while filled < len(into):
            count = pread_into(self._descriptor, into[filled:], address - self._address + filled)
            if not count:
                raise FileChangedError(f"{self.path} has become shorter; another process is changing it")
            filled += count

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Refuse a file that was changed in place since it was mapped: views of it show a mixture.

        A new file that was put under the same name does not matter to this mapping, which keeps the old content.

        Raises:
            FileChangedError: the file was changed.
        """
        if self._look() != self._fingerprint:
            raise FileChangedError(
                f"{self.path} was changed in place since it was mapped into memory; load the model again. Who replaces "
                "files of weights should write a new file and rename it, as save_model does"
            )


# What is mapped is a fact about the address space, which a process has one of; entries go with their mapping.
_mappings: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()
_begins: list[int] = []
_registering = threading.RLock()  # reentrant, because finalizers run anywhere
if hasattr(os, "register_at_fork"):  # a fork lacks the thread that may hold it
    os.register_at_fork(
        before=_registering.acquire, after_in_parent=_registering.release, after_in_child=_registering.release
    )


# Asked first, because it is asked for every tensor of a model.
_PLAIN = (torch.nn.Parameter, torch.Tensor)


def mapped_file_of(tensor: torch.Tensor) -> MappedFile | None:
    """The file that a tensor on the CPU is a view of; ``None`` if its memory is its own, or that of tensors in it."""
    wraps: bool = type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)
    if wraps or not tensor.is_cpu or tensor.numel() == 0:
        return None
    address = tensor.data_ptr()
    # A copy, for threads that map files meanwhile. Mappings do not overlap.
    begins = _begins.copy()
    at = bisect_right(begins, address) - 1
    mapping = _mappings.get(begins[at]) if at >= 0 else None
    return mapping if mapping is not None and address < begins[at] + len(mapping) else None


def map_file(path: Path, size: int) -> torch.Tensor:
    """The content of a file as 1-D uint8, mapped privately: what is written to it never reaches the file.

    Raises:
        ValueError: the file has fewer bytes.
    """
    return torch.frombuffer(MappedFile(path, size), dtype=torch.uint8)


def pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Read bytes of a file to memory; returns how many there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows
    data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def copy_from_file(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor, without autograd; those of a mapped file are read, as they are in the file.

    If the file has become shorter, that is an error here. Touching the mapping would end the process.

    Raises:
        FileChangedError: the file has become shorter.
    """
    file = mapped_file_of(values)
    if file is None or not is_plain_memory(values):
        copy_values(into, values)
        return
    direct = is_plain_memory(into) and (into.dtype, into.shape) == (values.dtype, values.shape)
    target = into if direct else torch.empty_like(values)
    file.read_into(values.data_ptr(), as_bytes(target))
    if not direct:
        copy_values(into, target)
    elif not into.is_inference():
        torch.autograd.graph.increment_version(into)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values that is no view of a mapped file; see `copy_from_file`."""
    if mapped_file_of(tensor) is None:
        return tensor
    found = torch.empty_like(tensor)
    copy_from_file(found, tensor)
    return found


def populate(mapped: torch.Tensor) -> bool:
    """Read a part of a mapped file into memory, and into this process's page tables, by one request.

    Args:
        mapped: begins at a page.

    Returns:
        False if the kernel cannot, or the disk did not answer.
    """
    call = _madvise()
    return call is not None and call(mapped.data_ptr(), mapped.numel(), _MADV_POPULATE_READ) == 0


def evict(mapped: torch.Tensor) -> bool:
    """Let a part of a mapped file go from memory, and from the page cache; touching it reads it again.

    What was written to is not in the file and is kept, in memory or in swap space. So is what other processes map.
    Files that this process may not write are only marked as what the kernel takes first when it needs memory.

    Args:
        mapped: begins at a page.

    Returns:
        False if the kernel cannot.
    """
    call = _madvise()
    return call is not None and all(
        call(mapped.data_ptr(), mapped.numel(), advice) == 0 for advice in (_MADV_COLD, _MADV_PAGEOUT)
    )


def read_around(mapped: torch.Tensor, wanted: bool) -> bool:
    """Set whether touching a part of a mapped file also reads its neighbourhood, as the kernel does by default.

    That is up to 8 MB on large disks, which is lost on a table of which single rows are used.

    Args:
        mapped: begins at a page.
        wanted: false for single pages.

    Returns:
        False if the kernel has no such advice.
    """
    call = _madvise()
    return (
        call is not None
        and call(mapped.data_ptr(), mapped.numel(), _MADV_NORMAL if wanted else _MADV_RANDOM) == 0
    )


@cache
def _madvise() -> Any:
    """The kernel's call; mmap's own method would keep the interpreter's lock while the disk is read."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


@contextmanager
def collector_paused() -> Iterator[Callable[[], None]]:
    """No search for garbage meanwhile; gives what ends the pause before its time.

    For planning, which makes several small objects per tensor, and all of them stay: with ten thousand tensors the
    collector would walk through everything in the process again and again, for nothing, and take as long as the rest.
    """
    enabled = gc.isenabled()

    def resume() -> None:
        if enabled:
            gc.enable()

    gc.disable()
    try:
        yield resume
    finally:
        resume()


def trim_heap() -> None:
    """Let the C library give freed memory back to the system, where it is glibc.

    It keeps large pieces for its next need once some of that size were freed; between smaller pieces that are still
    in use they may never fit it.
    """
    call = _malloc_trim()
    if call is not None:
        call(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None


class HostBuffers:
    """Host memory that one save after the other copies to: new memory costs several times the copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Memory of at least `nbytes` bytes, 1-D uint8, from a page on; ``pinned`` for copies from an accelerator."""
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())  # few sizes, so that what is free fits
        free = self._free.get((size, pinned))
        if free:
            return free.pop()
        return (
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) if pinned else new_bytes(size)
        )

    def give_back(self, buffer: torch.Tensor, pinned: bool) -> None:
        """Keep a buffer for the next save."""
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
