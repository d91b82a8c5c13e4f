"""Writing the files of a checkpoint: in one pass, hashed on the way, on the disk before the call returns."""

from __future__ import annotations

import io
import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.disk import LOCAL, Disk, hidden_sibling
from accel_ckpt.errors import CorruptCheckpointError, UnsupportedValueError
from accel_ckpt.format.blocks import BlockStream
from accel_ckpt.format.memory import FileImage, mapped_file_of
from accel_ckpt.modules.versions import with_versions
from accel_ckpt.tensor_storage import DTYPE_NAMES, as_bytes, compact, why_not_plain

__all__ = [
    "BLOCK_HASHED",
    "FileLayout",
    "FileRecord",
    "FileWriter",
    "PlannedFile",
    "about_tensors",
    "check_writable",
    "json_bytes",
    "lay_out",
    "plain_on",
    "replace_file",
    "write_bytes",
    "write_image",
    "write_safetensors",
    "write_safetensors_from",
    "write_torch",
]

BLOCK_HASHED = 1 << 22
"""Bytes of a block that has a checksum of its own."""

# Bytes. Kernels may take another path, and round otherwise, for memory that is less aligned.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint, as the manifest lists it."""

    size: int
    xxh3: str
    header: int = 0
    """For safetensors files: bytes of what comes before the tensors."""
    blocks: tuple[str, ...] = ()
    """xxh3 checksums of its blocks of ``BLOCK_HASHED`` bytes; in object storage, where parts of files are read."""


class FileWriter(io.RawIOBase):
    """A new file that hashes what it is given and is on the disk once closed by ``finish``."""

    def __init__(self, path: Path, disk: Disk = LOCAL) -> None:
        super().__init__()
        self.path = path
        self._disk = disk
        try:
            self.descriptor = disk.open_new(path)
        except BaseException:
            super().close()  # nothing is open, which Python 3.13 would complain of when it closes what is forgotten
            raise
        self._stream = BlockStream(self.descriptor, disk)

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        self._stream.write(view)
        return len(view)

    def write_block(self, block: memoryview) -> None:
        """Write memory without copying it: whole pages, that begin at a page, and do not change until ``finish``."""
        self._stream.write_block(block)

    def finish(self) -> FileRecord:
        """Put the content on the disk and say what it is."""
        self._stream.finish()
        self.close()
        return FileRecord(self._stream.size, self._stream.hash.hexdigest())

    def close(self) -> None:
        """Close the file, finished or not."""
        if not self.closed:
            self._stream.settle()
            self._disk.close(self.descriptor)
        super().close()


def json_bytes(data: Any) -> bytes:
    """JSON in UTF-8: two spaces of indent, keys in the order given, a newline at the end."""
    return f"{json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False)}\n".encode()


def write_bytes(path: Path, content: bytes | memoryview, disk: Disk = LOCAL) -> FileRecord:
    """Write a file of these bytes."""
    with FileWriter(path, disk) as file:
        file.write(content)
        return file.finish()


def write_torch(path: Path, value: Any, disk: Disk = LOCAL) -> FileRecord:
    """Write what ``torch.save`` writes."""
    with FileWriter(path, disk) as file:
        buffered = io.BufferedWriter(file, 1 << 20)
        torch.save(value, buffered)
        buffered.flush()
        return file.finish()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    disk: Disk = LOCAL,
) -> FileRecord:
    """Write a safetensors file, one tensor at a time.

    Tensors need not be contiguous, on the CPU or apart from each other in memory: each is made plain just
    before it is written, so that the extra memory is that of one tensor.

    Raises:
        UnsupportedValueError: a tensor has a dtype or layout that the format does not know, or has no values.
    """
    for name, tensor in tensors.items():
        check_writable(name, tensor)
    return write_safetensors_from(path, about_tensors(tensors), lambda name: (tensors[name],), metadata, disk)


def about_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shape and dtype by name, of tensors that are writable."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write_safetensors_from(
    path: Path,
    about: Mapping[str, tuple[Sequence[int], torch.dtype]],
    runs: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    disk: Disk = LOCAL,
) -> FileRecord:
    """Write a safetensors file of tensors that are not in memory.

    Args:
        path: must not exist.
        about: shape and dtype by name.
        runs: the tensors whose values, one after the other, are those of the tensor of that name.
        metadata: of the file.
        disk: where.
    """
    layout = lay_out(about, metadata)
    with FileWriter(path, disk) as file:
        file.write(layout.header)
        for name in layout.entries:
            for run in runs(name):
                plain = plain_on(run, "cpu")
                if plain.numel():
                    file.write(as_bytes(plain))
                del run, plain  # before the next one is read
        record = file.finish()
    if record.size != layout.size:
        raise CorruptCheckpointError(
            f"{path} got {record.size} bytes instead of {layout.size}: the tensors changed while they were written"
        )
    return replace(record, header=len(layout.header))


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a safetensors file: header, and byte range of every tensor."""

    header: bytes
    """All that comes before the tensors."""
    entries: Mapping[str, Any]
    """Name to dtype, shape and byte range behind the header, in the order of the bytes."""
    size: int
    """Bytes of the file."""

    def begin(self, name: str) -> int:
        """Offset in the file of the first byte of a tensor."""
        return len(self.header) + int(self.entries[name]["data_offsets"][0])


def lay_out(
    about: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: Mapping[str, str] | None
) -> FileLayout:
    """Lay out a safetensors file for tensors of these shapes and dtypes."""
    entries, end = {}, 0
    # The format allows no holes. Multiples of the alignment come first, so they start at multiples of it,
    # as memory from torch's allocator does; then wide dtypes, so that all start at multiples of their width.
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in about.items()}
    order = sorted([(bool(sizes[name] % _ALIGNMENT), -about[name][1].itemsize, name) for name in about])
    for _, _, name in order:
        shape, dtype = about[name]
        begin, end = end, end + sizes[name]
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    extra = {"__metadata__": dict(metadata)} if metadata else {}
    header = json.dumps({**extra, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    header = len(header).to_bytes(8, "little") + header
    return FileLayout(header, entries, len(header) + end)


def write_image(path: Path, image: FileImage, disk: Disk = LOCAL) -> FileRecord:
    """Write a file whose content is in memory already."""
    with FileWriter(path, disk) as file:
        for block in image.blocks():
            if len(block) % mmap.PAGESIZE:
                file.write(block)
            else:
                file.write_block(block)
        return file.finish()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of tensors that is to be written; they are writable (:func:`check_writable`)."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None
    """The metadata of a safetensors file; ``None`` for a file of ``torch.save``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a file of ``torch.save`` that are not tensors."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of the modules' state dicts, for a file of ``torch.save``; in others they are metadata."""

    def content(self) -> dict[str, Any]:
        """The object that ``torch.save`` writes."""
        return with_versions({**compact(self.tensors), **self.extra}, self.versions)

    def write(self, path: Path, disk: Disk = LOCAL) -> FileRecord:
        """Write it, one tensor at a time."""
        if self.metadata is None:
            return write_torch(path, self.content(), disk)
        about, tensors = about_tensors(self.tensors), self.tensors
        return write_safetensors_from(path, about, lambda name: (tensors[name],), self.metadata, disk)


def replace_file(path: Path, write: Callable[[Path], FileRecord], disk: Disk = LOCAL) -> FileRecord:
    """Write a file under a temporary name beside ``path`` and rename it, so that the old content stays until
    then.

    A process that has the old file mapped keeps seeing the old content.
    """
    temporary = hidden_sibling(path, "part")
    try:
        record = write(temporary)
        disk.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    disk.sync_directory(path.parent)
    return record


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what a safetensors file cannot hold, and views of a file that would end the process when they are read.

    Raises:
        FileChangedError: the tensor is a view of a mapped file that was changed in place.
        UnsupportedValueError: a tensor has a dtype or layout that the format does not know, or has no values.
    """
    reason = why_not_plain(tensor)
    if reason is None and (file := mapped_file_of(tensor)) is not None:
        file.check_unchanged()
    if reason is None and tensor.dtype not in DTYPE_NAMES:
        reason = (
            f"has the dtype {tensor.dtype}, which safetensors does not know; pass safe_serialization=False"
        )
    if reason is None and name == "__metadata__":
        reason = "has a name that safetensors reserves; rename it, or pass safe_serialization=False"
    if reason is None and not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        reason = "has a name that is not valid Unicode; rename it"
    if reason is not None:
        raise UnsupportedValueError(f"the tensor {name!r} {reason}")


def plain_on(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The values of a tensor, contiguous, as they are written; the tensor itself if it already is."""
    return tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
