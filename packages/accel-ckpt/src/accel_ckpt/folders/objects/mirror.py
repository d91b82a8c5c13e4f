"""Local files that mirror objects: of the same size, made and filled with the needed parts before they are read.

All readers of checkpoints read these files: a header, the parts of tensors that a rank holds, or a whole tensor.
Missing parts are fetched in parallel, in whole blocks, whose checksums are compared as they arrive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from accel_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectStorageError,
)
from accel_ckpt.folders.objects.leftovers import check_sizes, open_manifest
from accel_ckpt.folders.objects.scratch import Scratch
from accel_ckpt.folders.objects.store import PART, Store, in_parallel
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.format.box_reads import BoxRead, spans
from accel_ckpt.format.index import inside
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.reader import check_digest, file_digest
from accel_ckpt.format.saved_tensors import FileChecks
from accel_ckpt.format.writer import BLOCK_HASHED, FileRecord
from accel_ckpt.locations import RemotePath

__all__ = ["Mirror", "RemoteFiles", "open_remote"]


class _BlockRequest(NamedTuple):
    name: str
    first: int
    """Block."""
    last: int
    """Block behind the end."""


@dataclass(frozen=True)
class _Object:
    path: Path
    record: FileRecord

    @property
    def blocks(self) -> range:
        return range(-(-self.record.size // BLOCK_HASHED))


class Mirror:
    """Local files for the objects of a folder.

    Args:
        store: the store of the objects.
        files: size and checksums of each file by name; an empty checksum is not compared.
        prefix: prefix of the names of the objects.
        verify: compare checksums.
    """

    def __init__(self, store: Store, files: Mapping[str, FileRecord], prefix: str, verify: bool) -> None:
        self._store, self._prefix, self._verify = store, prefix, verify
        self._scratch = Scratch()
        self.folder = self._scratch.folder
        """The folder of the local files."""
        self.remove = self._scratch.remove
        """Remove the local files; those that are mapped stay readable."""
        self._files = files
        self._there: dict[str, set[int]] = {}
        """The blocks that are here of each file that was made."""
        self._lock = threading.Lock()

    def make(self, names: Iterable[str]) -> None:
        """Make files without their content, for who asks which there are."""
        for name in names:
            self._made(name, self._object(name))

    def fetch(self, names: Iterable[str]) -> None:
        """Bring whole files here.

        Raises:
            CorruptCheckpointError: the content is not what was saved, or the manifest does not list the file.
            CheckpointNotFoundError: the object has been removed.
        """
        self._fetch({name: self._object(name).blocks for name in names})

    def fetch_spans(self, wanted: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Bring ranges of bytes of files here, and whatever shares their blocks; errors as :meth:`fetch`."""
        blocks: dict[str, Iterable[int]] = {}
        for name, ranges in wanted.items():
            one = self._object(name)
            if one.record.blocks or not self._verify:
                found: set[int] = set()
                for begin, end in ranges:
                    found.update(range(begin // BLOCK_HASHED, -(-end // BLOCK_HASHED)))
                blocks[name] = found
            else:  # only the checksum of the whole file is known
                blocks[name] = one.blocks
        self._fetch(blocks)

    def check(self) -> None:
        """Read every object and compare its checksums, without keeping anything; errors as :meth:`fetch`."""
        for name in self._files:
            one = self._object(name)
            if one.record.blocks:
                for _ in in_parallel(self._read, list(_requests(name, one.blocks))):
                    pass
            else:
                self.fetch([name])

    def name_of(self, path: Path) -> str:
        """The name of the object that a local file stands for."""
        return path.relative_to(self.folder).as_posix()

    def _object(self, name: str) -> _Object:
        if name not in self._files:
            raise CorruptCheckpointError(
                f"{self._store.uri(self._prefix + name)} is not listed in the manifest of its checkpoint"
            )
        return _Object(inside(self.folder, name), self._files[name])

    def _made(self, name: str, one: _Object) -> set[int]:
        """The blocks of a file that are here; a file of which there are none yet is made."""
        if name not in self._there:
            try:
                one.path.parent.mkdir(parents=True, exist_ok=True)
                with open(one.path, "xb") as file:
                    file.truncate(one.record.size)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise CorruptCheckpointError(
                    f"{self._store.uri()} has names of files that are folders of others: {error}"
                ) from error
            self._there[name] = set()
        return self._there[name]

    def _fetch(self, wanted: Mapping[str, Iterable[int]]) -> None:
        with self._lock:
            requests: list[_BlockRequest] = []
            whole: list[str] = []
            for name, blocks in wanted.items():
                one = self._object(name)
                missing = sorted(set(blocks) - self._made(name, one))
                requests += _requests(name, missing)
                if missing and not one.record.blocks and self._verify:
                    whole.append(name)
            arrived: dict[str, set[int]] = {}
            for request in in_parallel(self._bring, requests):
                arrived.setdefault(request.name, set()).update(range(request.first, request.last))
            for name in whole:
                self._check_whole(name)
            for name, blocks in arrived.items():
                self._there[name].update(blocks)

    def _bring(self, request: _BlockRequest) -> _BlockRequest:
        data = self._read(request)
        descriptor = os.open(self._object(request.name).path, os.O_WRONLY)
        try:
            view, at = memoryview(data), request.first * BLOCK_HASHED
            while view:
                count = os.pwrite(descriptor, view, at)
                view, at = view[count:], at + count
        except OSError as error:
            raise ObjectStorageError(
                f"{self._store.uri(self._prefix + request.name)} cannot be kept in {self.folder}: {error}; set TMPDIR "
                "to a folder with enough space"
            ) from error
        finally:
            os.close(descriptor)
        return request

    def _read(self, request: _BlockRequest) -> bytes:
        """The bytes of some blocks; where a checksum differs they are read once more, since requests can fail, too."""
        one = self._object(request.name)
        begin, end = request.first * BLOCK_HASHED, min(request.last * BLOCK_HASHED, one.record.size)
        for last_time in (False, True):
            data = self._store.read(self._prefix + request.name, begin, end)
            bad = self._damaged(one.record, request, memoryview(data))
            if bad is None:
                return data
            if last_time:
                raise CorruptCheckpointError(
                    f"{self._store.uri(self._prefix + request.name)} is not what was saved from byte "
                    f"{bad * BLOCK_HASHED} on: its checksum differs from the manifest's; load another checkpoint"
                )
        raise AssertionError("the last time returns or raises")

    def _damaged(self, record: FileRecord, request: _BlockRequest, data: memoryview) -> int | None:
        if not self._verify or not record.blocks:
            return None
        for block in range(request.first, request.last):
            at = (block - request.first) * BLOCK_HASHED
            if xxhash.xxh3_64_hexdigest(data[at : at + BLOCK_HASHED]) != record.blocks[block]:
                return block
        return None

    def _check_whole(self, name: str) -> None:
        one = self._object(name)
        if one.record.xxh3:
            try:
                check_digest(one.path, file_digest(one.path), one.record.xxh3)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"{self._store.uri(self._prefix + name)}: {error}") from error


def _requests(name: str, blocks: Iterable[int]) -> Iterator[_BlockRequest]:
    """Blocks that follow each other in one request, up to a size."""
    first = last = -1
    for block in blocks:
        if block != last or (last - first) * BLOCK_HASHED >= PART:
            if first >= 0:
                yield _BlockRequest(name, first, last)
            first = block
        last = block + 1
    if first >= 0:
        yield _BlockRequest(name, first, last)


class RemoteFiles(FileChecks):
    """Fetches parts of files to a mirror before they are read, and checks them.

    Args:
        mirror: the mirror of the files.
    """

    by_range = True

    def __init__(self, mirror: Mirror, header_sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._mirror = mirror
        self._headers = header_sizes

    def __call__(self, files: Iterable[Path]) -> None:
        """Bring whole files."""
        self._mirror.fetch(sorted(map(self._mirror.name_of, set(files))))

    def fetch(self, files: Iterable[Path]) -> None:
        """Bring whole files."""
        self(files)

    def headers(self, files: Iterable[Path]) -> None:
        """Bring the headers of safetensors files."""
        names = list(map(self._mirror.name_of, files))
        known = {name: [(0, self._headers[name])] for name in names if name in self._headers}
        self._mirror.fetch_spans(known)
        self._mirror.fetch(name for name in names if name not in known)

    def reads(self, reads: Iterable[BoxRead]) -> None:
        """Bring the bytes that will be read."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for read in reads:
            found = spans(read, BLOCK_HASHED)
            if found is not None:
                wanted.setdefault(self._mirror.name_of(found.file), []).extend(found.ranges)
        self._mirror.fetch_spans(wanted)


def open_remote(
    directory: RemotePath, verify: bool, text: bytes | None = None
) -> tuple[Manifest, Mirror, RemoteFiles]:
    """The manifest of a training state, local files for its objects, and what fills them.

    Args:
        directory: of the training state.
        verify: compare checksums.
        text: of the manifest, where another rank has read it and compared the sizes of all objects.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or not a complete one.
        CorruptCheckpointError: its manifest is damaged, or an object is missing or has another size.
        CheckpointVersionError: it was written by a newer version.
    """
    store = open_store(directory)
    manifest, found = open_manifest(store, text)
    try:
        if text is None:
            check_sizes(store, manifest)
    except CorruptCheckpointError:
        if not _still_there(store):
            raise CheckpointNotFoundError(
                f"{directory} was removed while it was read, as by a training that keeps few checkpoints"
            ) from None
        raise
    mirror = Mirror(store, manifest.files, f"{manifest.folder}/" if manifest.folder else "", verify)
    (mirror.folder / MANIFEST_NAME).write_bytes(found)
    headers = {name: record.header for name, record in manifest.files.items() if record.header}
    return manifest, mirror, RemoteFiles(mirror, headers)


def _still_there(store: Store) -> bool:
    try:
        store.read(MANIFEST_NAME)
    except CheckpointError:
        return False
    return True
