"""Cache files for offloaded weights that no safetensors file holds in the required form; each is written once."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from accel_bigmodel.errors import OffloadError
from accel_ckpt.disk import LOCAL, Disk, hidden_sibling
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.reader import MappedShard
from accel_ckpt.format.writer import about_tensors, check_writable, lay_out, plain_on
from accel_ckpt.tensor_storage import as_bytes

__all__ = ["CacheFile", "OffloadCache", "check_folder"]

# Increased when the layout of the files changes; files of other versions are not used.
_FORMAT = "1"

_PART = re.compile(r"\.offload-[0-9a-f]{32}\.safetensors\.part-[0-9a-f]{12}")
_DEAD = 600  # seconds since the last write


def check_folder(folder: object, argument: str) -> None:
    """Refuse what is not a path of a folder; None is allowed.

    Args:
        folder: as a user gave it.
        argument: the name of the argument, for the message.

    Raises:
        OffloadError: it is neither text nor a path.
    """
    if not isinstance(folder, str | os.PathLike | None):
        raise OffloadError(f"{argument} is {folder!r}; give the path of a folder, as text or a Path")


About = Mapping[str, tuple[Sequence[int], torch.dtype]]


class OffloadCache:
    """Files of weights in a folder, each named after a fingerprint of its source.

    A file is used only if its header is complete and has the same fingerprint; otherwise it is written again. Other
    files in the folder, such as those of Accelerate, are ignored. Old cache files are never removed, because another
    process may be about to map them.

    Args:
        folder: made when something is written.
        disk: performs the writes.
    """

    def __init__(self, folder: str | os.PathLike[str], disk: Disk = LOCAL) -> None:
        self.folder = Path(folder).expanduser()
        self._disk = disk

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Views of a file with these values, which is written if it does not exist.

        Args:
            tensors: by name, on any device; each is read once to compute the fingerprint, and again to write it.

        Raises:
            OffloadError: the folder cannot be written, or does not have enough space.
            UnsupportedValueError: a tensor has a dtype that the format does not support, or has no values.
        """
        for name, tensor in tensors.items():
            check_writable(name, tensor)
        about = about_tensors(tensors)
        digest = xxhash.xxh3_128()
        for name in sorted(tensors):
            plain = plain_on(tensors[name], "cpu")
            if plain.numel():
                digest.update(as_bytes(plain))
        file = self.open(digest.hexdigest(), about)
        if not file.is_there:
            with file:
                for name, tensor in tensors.items():
                    file.put(name, tensor)
        return file.tensors()

    def open(self, key: str, about: About) -> CacheFile:
        """The file of the weights identified by ``key``; if it does not exist, writing has begun.

        Args:
            key: identifies the source of the weights.
            about: shape and dtype by name.

        Raises:
            OffloadError: it has to be written, and the folder cannot be written or does not have enough space.
        """
        facts = repr(
            (_FORMAT, key, [(name, tuple(about[name][0]), str(about[name][1])) for name in sorted(about)])
        )
        fingerprint = xxhash.xxh3_128_hexdigest(facts.encode("utf-8", "surrogateescape"))
        file = CacheFile(self.folder / f"offload-{fingerprint}.safetensors", fingerprint, about, self._disk)
        if not file.is_there:
            self._check_space(file.size)
            file.begin()
        return file

    def _check_space(self, nbytes: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_dead_parts()
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise OffloadError(
                f"weights cannot be written to {self.folder}: permission denied; choose another folder"
            )
        if free < nbytes:
            raise OffloadError(
                f"{self.folder} has {free} bytes free, and the weights to offload take {nbytes}; choose an offload "
                "folder on a larger disk, or save the model as safetensors in the dtype that you use, which needs no "
                "copy"
            )

    def _remove_dead_parts(self) -> None:
        """Remove the partial files of writers that were killed."""
        for path in self.folder.iterdir():
            if _PART.fullmatch(path.name):
                with suppress(FileNotFoundError):  # its writer renamed it, or another process removed it
                    if time.time() - path.stat().st_mtime > _DEAD:
                        self._disk.unlink(path)


class CacheFile:
    """One file of the cache: it exists, or is written tensor by tensor in any order.

    As a context manager it is published under its name at the end of the block; after an exception it is removed.
    """

    def __init__(self, path: Path, fingerprint: str, about: About, disk: Disk) -> None:
        self.path = path
        self.about = about
        self._disk = disk
        self._fingerprint = fingerprint
        self._layout = lay_out(about, {"format": "pt", "accel_offload": fingerprint})
        self._descriptor: int | None = None
        self._temporary = hidden_sibling(path, "part")
        self._missing = set(about)
        self._shard = self._look()

    @property
    def is_there(self) -> bool:
        """Whether the file exists, so need not be written."""
        return self._shard is not None

    @property
    def size(self) -> int:
        """In bytes."""
        return self._layout.size

    def tensors(self) -> dict[str, torch.Tensor]:
        """Private views of the mapped file by name."""
        assert self._shard is not None, "written before it is read"
        return {name: self._shard.tensor(name) for name in self.about}

    def begin(self) -> None:
        """Reserve its whole size, because a check of the free space does not account for other writers and quotas.

        Raises:
            OffloadError: there is not enough space, or the folder cannot be written.
        """
        try:
            self._descriptor = self._disk.open_new(self._temporary)
            self._disk.reserve(self._descriptor, self.size)
            self._write(0, memoryview(self._layout.header))
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError):
                raise _cannot_write(self.path.parent, error) from error
            raise

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor with its announced shape and dtype.

        Raises:
            OffloadError: the disk is full, or cannot be written.
        """
        shape, dtype = self.about[name]
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype), f"{name} is as announced"
        plain = plain_on(tensor, "cpu")
        try:
            if plain.numel():
                self._write(self._layout.begin(name), as_bytes(plain))
        except OSError as error:
            raise _cannot_write(self.path.parent, error) from error
        self._missing.discard(name)

    def __enter__(self) -> CacheFile:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Publish the file, or remove what was written."""
        if kind is None:
            self.publish()
        else:
            self.abandon()

    def publish(self) -> None:
        """Flush the file to disk, and rename it atomically.

        Raises:
            OffloadError: the disk is full, or cannot be written.
        """
        assert self._descriptor is not None, "something was written"
        assert not self._missing, f"{self._missing} were written"
        try:
            self._disk.fsync(self._descriptor)
            self._close()
            self._disk.rename(self._temporary, self.path)
            self._disk.sync_directory(self.path.parent)
        except OSError as error:
            self.abandon()
            raise _cannot_write(self.path.parent, error) from error
        self._shard = self._look()
        if self._shard is None:
            raise OffloadError(
                f"{self.path} does not hold what was written to it; another program changes the folder"
            )

    def abandon(self) -> None:
        """Remove what was written so far."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _look(self) -> MappedShard | None:
        """The existing file, if it is complete and has the right fingerprint."""
        try:
            shard = MappedShard(self.path)
        except (OSError, CorruptCheckpointError):  # if it cannot be read, writing it gives the reason
            return None
        header = shard.header
        found = {name: (entry.shape, entry.dtype) for name, entry in header.entries.items()}
        wanted = {name: (tuple(shape), dtype) for name, (shape, dtype) in self.about.items()}
        whole = found == wanted and header.metadata.get("accel_offload") == self._fingerprint
        return shard if whole else None

    def _write(self, offset: int, data: memoryview) -> None:
        assert self._descriptor is not None
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        while data:
            data = data[self._disk.write(self._descriptor, data) :]

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _cannot_write(folder: Path, error: OSError) -> OffloadError:
    reason = (
        "a file of that name exists"
        if isinstance(error, (FileExistsError, NotADirectoryError))
        else str(error)
    )
    advice = "free some space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
    return OffloadError(
        f"weights cannot be written to the offload folder {folder}: {reason}; {advice} another folder"
    )
