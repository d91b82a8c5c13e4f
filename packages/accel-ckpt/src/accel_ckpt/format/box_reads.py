"""Reading boxes of tensors from files into tensors: only the bytes that are needed, in few and large requests."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import torch

from accel_ckpt.format.memory import copy_from_file
from accel_ckpt.format.reader import TensorEntry, read_into
from accel_ckpt.geometry import Box
from accel_ckpt.tensor_storage import as_bytes, copy_values

__all__ = ["BoxRead", "FileSpans", "read_boxes", "spans"]

# Bytes of a request, and of the memory that it may need beside its target.
_REQUEST = 1 << 23

# Bytes between two wanted runs that are read along: another request would take longer, at least where files are remote.
_GAP = 1 << 16

# Bytes. Smaller reads that are side by side in a file become one request.
_SMALL = 1 << 20

# Requests at a time. Each holds at most `_REQUEST` bytes until it is copied.
_READERS = 4


class BoxRead(NamedTuple):
    """A box of what a file holds, and the tensor of the box's shape that it goes to."""

    content: TensorEntry | torch.Tensor
    """The entry of a safetensors file, or a view of a mapped file."""
    box: Box
    """The box within the content."""
    into: torch.Tensor


class FileSpans(NamedTuple):
    """Ranges of bytes of a file."""

    file: Path
    ranges: Sequence[tuple[int, int]]
    """Pairs of begin and end; the end is behind the last byte."""


def spans(read: BoxRead, gap: int) -> FileSpans | None:
    """The bytes of a file that a read needs; runs with at most `gap` bytes between them count as one.

    Returns:
        ``None`` where nothing is read from a file.
    """
    if isinstance(read.content, torch.Tensor) or not read.box.volume:
        return None
    return FileSpans(read.content.file, list(_spans(read, gap)))


def _spans(read: BoxRead, gap: int) -> Iterator[tuple[int, int]]:
    entry = _entry(read)
    size = entry.dtype.itemsize
    strides = _strides(entry.shape)
    run, outer = _run(read)
    # Dimensions whose runs are close to each other make one span; the others are gone through.
    while outer and strides[outer - 1] * size - run * size <= gap:
        run += (read.box.sizes[outer - 1] - 1) * strides[outer - 1]
        outer -= 1
    begin = _begin(read)
    starts = (
        begin + size * sum(i * s for i, s in zip(index, strides, strict=False))
        for index in itertools.product(*map(range, read.box.sizes[:outer]))
    )
    return ((start, start + run * size) for start in starts)


class _Copy(NamedTuple):
    """Values in memory, and the target that they are copied to."""

    into: torch.Tensor
    values: torch.Tensor


def read_boxes(reads: Iterable[BoxRead]) -> None:
    """Fill the targets. Values of another dtype are converted.

    Raises:
        CorruptCheckpointError: a file has become shorter.
    """
    with torch.no_grad():
        wanted: list[BoxRead] = []
        for read in reads:
            if isinstance(read.content, torch.Tensor):
                whole = read.box.sizes == tuple(read.content.shape)  # an odd layout has no slices
                copy_from_file(read.into, read.content if whole else read.content[read.box.slices])
            elif read.into.numel():
                wanted += _divided(read)
                if not read.into.is_inference():
                    torch.autograd.graph.increment_version(read.into)  # bytes may be read past torch
        wanted.sort(key=lambda read: (str(_entry(read).file), _begin(read)))
        batches = list(_batches(wanted))
        if len(batches) < 2:
            for batch in batches:
                _copy(_read(batch))
            return
        pending: deque[Future[list[_Copy]]] = deque()
        with ThreadPoolExecutor(_READERS) as readers:
            for batch in batches:
                if len(pending) == _READERS:
                    _copy(pending.popleft().result())
                pending.append(readers.submit(_read, batch))
            for future in pending:
                _copy(future.result())


def _copy(copies: Iterable[_Copy]) -> None:
    for into, values in copies:
        copy_values(into, values)


def _entry(read: BoxRead) -> TensorEntry:
    assert isinstance(read.content, TensorEntry), "views are copied at once"
    return read.content


def _divided(read: BoxRead) -> Iterator[BoxRead]:
    """Divide a read into requests of limited size, along the outermost dimension that can be divided."""
    size = _entry(read).dtype.itemsize
    nbytes = read.box.volume * size
    dim = next((d for d, n in enumerate(read.box.sizes) if n > 1), None)
    if nbytes <= _REQUEST or dim is None:
        yield read
        return
    count = read.box.sizes[dim]
    step = max(1, count * _REQUEST // nbytes)
    for start in range(0, count, step):
        length = min(step, count - start)
        offsets, sizes = list(read.box.offsets), list(read.box.sizes)
        offsets[dim] += start
        sizes[dim] = length
        piece = BoxRead(read.content, Box(tuple(offsets), tuple(sizes)), read.into.narrow(dim, start, length))
        yield from _divided(piece) if step == 1 else (piece,)


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next, per dimension, of contiguous values."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _begin(read: BoxRead) -> int:
    """Offset in the file of the first byte."""
    entry = _entry(read)
    first = sum(o * s for o, s in zip(read.box.offsets, _strides(entry.shape), strict=True))
    return entry.offset + first * entry.dtype.itemsize


def _run(read: BoxRead) -> tuple[int, int]:
    """Elements that are side by side in the file, and the number of dimensions that runs are counted by."""
    shape, sizes = _entry(read).shape, read.box.sizes
    cut = next((d for d in reversed(range(len(shape))) if sizes[d] != shape[d]), 0)
    outer = next((d + 1 for d in reversed(range(cut)) if sizes[d] > 1), 0)
    return math.prod(sizes[outer:]), outer


def _batches(reads: Iterable[BoxRead]) -> Iterator[list[BoxRead]]:
    """Reads of one file, up to the bytes of a request."""
    batch: list[BoxRead] = []
    room = _REQUEST
    for read in reads:
        nbytes = read.box.volume * _entry(read).dtype.itemsize
        if batch and (nbytes > room or _entry(batch[0]).file != _entry(read).file):
            yield batch
            batch, room = [], _REQUEST
        batch.append(read)
        room -= nbytes
    if batch:
        yield batch


def _read(batch: Sequence[BoxRead]) -> list[_Copy]:
    path = _entry(batch[0]).file
    copies: list[_Copy] = []
    small: list[tuple[BoxRead, int, int]] = []
    with open(path, "rb", buffering=0) as file:
        for read in batch:
            begin, nbytes = _begin(read), read.box.volume * _entry(read).dtype.itemsize
            alone = _run(read)[1] or nbytes >= _SMALL
            if small and (alone or begin - small[-1][2] > _GAP):
                copies += _read_together(file, path, small)
                small = []
            if alone:
                copies += _read_alone(file, path, read)
            else:
                small.append((read, begin, begin + nbytes))
        copies += _read_together(file, path, small)
    return copies


def _read_together(file: IO[bytes], path: Path, small: Sequence[tuple[BoxRead, int, int]]) -> Iterator[_Copy]:
    """One request for reads that are close to each other; each is one run of bytes."""
    if not small:
        return
    first = small[0][1]
    span = torch.empty(max(end for _, _, end in small) - first, dtype=torch.uint8, device="cpu")
    _read_at(file, path, first, span)
    for read, begin, end in small:
        values = span[begin - first : end - first]
        dtype = _entry(read).dtype
        if values.storage_offset() % dtype.itemsize:
            values = values.clone()
        yield _Copy(read.into, values.view(dtype).view(read.box.sizes))


def _read_alone(file: IO[bytes], path: Path, read: BoxRead) -> Iterator[_Copy]:
    entry, into = _entry(read), read.into
    plain = type(into) is torch.Tensor and into.is_cpu and not into.is_conj() and not into.is_neg()
    direct = plain and into.dtype == entry.dtype and into.is_contiguous()
    values = into if direct else torch.empty(read.box.sizes, dtype=entry.dtype, device="cpu")
    run, outer = _run(read)
    if not outer:
        _read_at(file, path, _begin(read), values)
    else:
        _read_runs(file, path, read, values.view(-1, run), outer)
    if not direct:
        yield _Copy(into, values)


def _read_runs(file: IO[bytes], path: Path, read: BoxRead, rows: torch.Tensor, outer: int) -> None:
    """Read runs of bytes to the rows of a tensor; what is between two is read along if it is little."""
    entry = _entry(read)
    size, strides = entry.dtype.itemsize, _strides(entry.shape)
    run, count, stride = rows.shape[1], read.box.sizes[outer - 1], strides[outer - 1]
    together = (stride - run) * size <= _GAP
    block = max(1, _REQUEST // (stride * size)) if together else 1
    begins = (
        _begin(read) + size * sum(i * s for i, s in zip(index, strides, strict=False))
        for index in itertools.product(*map(range, read.box.sizes[: outer - 1]))
    )
    longest = (min(block, count) - 1) * stride + run
    spans = torch.empty(longest if block > 1 else 0, dtype=entry.dtype, device="cpu")
    for number, begin in enumerate(begins):
        for start in range(0, count, block):
            length = min(block, count - start)
            into = rows[number * count + start : number * count + start + length]
            at = begin + start * stride * size
            if length == 1:
                _read_at(file, path, at, into)
            else:
                span = spans[: (length - 1) * stride + run]
                _read_at(file, path, at, span)
                into.copy_(span.as_strided((length, run), (stride, 1)))


def _read_at(file: IO[bytes], path: Path, offset: int, into: torch.Tensor) -> None:
    read_into(file, as_bytes(into), path, offset)
