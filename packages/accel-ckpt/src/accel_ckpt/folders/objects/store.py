"""Objects below a URI, by fsspec: the only module that knows which file system is behind it.

Object storage has no folders, no renames and no locks, but an object appears as a whole or not at all.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Protocol, TypeVar

from accel_ckpt.errors import CheckpointNotFoundError, ObjectStorageError
from accel_ckpt.locations import RemotePath
from accel_state import environment
from accel_state.clusters.topology import detect
from accel_state.errors import MissingDependencyError
from accel_state.host.versions import install_extra
from accel_state.messages import first_line

__all__ = ["PART", "Store", "Upload", "in_parallel", "requests_at_once"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

PART = 1 << 24
"""Bytes of a part of an upload, and of a request for a part of an object."""

# Requests on their way at a time: of a rank, and of a machine, whose memory for them is 512 MB for any number of ranks.
_OF_A_RANK = 8
_OF_A_MACHINE = 32

# Seconds before the second and third attempt; the file systems repeat requests themselves, too.
_PAUSES = (0.5, 2.0)

# What another attempt does not change.
_LASTING = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotImplementedError,
    TypeError,
)

_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az",
}  # fmt: skip
_TIMES = ("LastModified", "last_modified", "mtime", "created")  # of s3fs, adlfs, gcsfs, fsspec's own
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


class Upload(Protocol):
    """An object that is being written in parts; it appears when it is complete."""

    ordered: bool
    """Parts must be sent one after the other."""

    def send(self, number: int, data: bytes) -> None:
        """Send part `number`, from 1 on; from any thread."""

    def complete(self, size: int) -> None:
        """Make the object of `size` bytes visible, after all parts were sent."""

    def abort(self) -> None:
        """Give it up."""


class Store:
    """Objects below a URI, by their names relative to it, with ``/`` between the parts of a name.

    Args:
        root: the URI.

    Raises:
        MissingDependencyError: the file system of the URI is not installed.
    """

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self.fs, self.base = _file_system(root)

    def ask(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, with a time limit if it takes one."""
        return call(*arguments, **options)

    def uri(self, name: str = "") -> str:
        """The URI of an object, for messages."""
        return f"{self.root}/{name}" if name else str(self.root)

    def path(self, name: str = "") -> str:
        """The path of an object in the file system."""
        return f"{self.base}/{name}" if name else self.base

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins with a folder's; none if there are none."""
        try:
            found = self.attempt(lambda: dict(self.below(self.path(prefix))), "listing", prefix)
        except CheckpointNotFoundError:
            return {}
        start = len(self.base) + 1
        return {path[start:]: size for path, size in found.items() if path[start:]}

    def below(self, path: str) -> Iterator[tuple[str, int]]:
        """Paths and sizes of all objects below one. Not by ``find``, which leaves out what cannot be listed."""
        for about in self.ask(self.fs.ls, path, detail=True):
            name = str(about["name"])
            if about["type"] != "directory":
                yield name, int(about["size"] or 0)
            elif name.rstrip("/") != path:
                yield from self.below(name)

    def children(self) -> list[str]:
        """Names one level below, of objects and of what would be folders; none if there are none.

        Raises:
            ObjectStorageError: the listing failed, or there is no such bucket: that is no place without checkpoints.
        """
        try:
            found: Iterable[str] = self.attempt(
                lambda: self.ask(self.fs.ls, self.base, detail=False), "listing", ""
            )
        except CheckpointNotFoundError as error:
            gone = self.missing_bucket(error)
            if gone is not None:
                raise ObjectStorageError(gone) from error
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    def missing_bucket(self, error: CheckpointNotFoundError) -> str | None:
        """The message for a listing that failed because the bucket is missing; None: the bucket may just be empty."""
        return None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read the bytes of an object, or of a range of it, which must exist.

        Raises:
            CheckpointNotFoundError: there is no such object.
            ObjectStorageError: it cannot be read, or answers are cut off.
        """

        def get() -> bytes:
            if end is None and not begin:
                whole: bytes = self.ask(self.fs.cat_file, self.path(name))
                return whole
            data: bytes = self.ask(self.fs.cat_file, self.path(name), start=begin, end=end)
            if end is not None and len(data) != end - begin:
                raise OSError(f"{len(data)} of {end - begin} bytes arrived")
            return data

        if end is not None and begin >= end:
            return b""
        return self.attempt(get, "reading", name)

    def modified(self, name: str) -> float | None:
        """When an object was written, in seconds since the epoch; None: the file system does not say it."""
        about = self.attempt(lambda: self.ask(self.fs.info, self.path(name)), "reading", name)
        time = next((about[key] for key in _TIMES if about.get(key) is not None), None)
        return time.timestamp() if isinstance(time, datetime) else time

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, in one request."""
        self.attempt(lambda: self.ask(self.fs.pipe_file, self.path(name), data), "writing", name)

    def upload(self, name: str) -> Upload:
        """Begin to write an object in parts."""
        return _StreamUpload(self, name)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there are removed already."""

        def remove(name: str) -> None:
            try:
                self.attempt(lambda: self.ask(self.fs.rm_file, self.path(name)), "removing", name)
            except CheckpointNotFoundError:
                logger.info("%s is not there any more", self.uri(name))

        for _ in in_parallel(remove, list(names)):
            pass

    def abandon_uploads(self, prefix: str, chosen: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Give up uploads in parts of other processes, where storage keeps the parts of unfinished ones.

        Args:
            prefix: of their names; with what follows at once, not a folder.
            chosen: which of the names.

        Returns:
            The names.
        """
        return []

    def attempt(self, call: Callable[[], T], doing: str, name: str) -> T:
        """Make a request, and retry it after errors that may be temporary.

        Raises:
            CheckpointNotFoundError: there is no such object or bucket.
            ObjectStorageError: the request failed; names the URI and says what to do.
        """
        for pause in (*_PAUSES, None):
            try:
                return call()
            except Exception as error:
                if pause is None or _lasts(error):
                    raise self._explained(error, doing, name) from error
                logger.info("%s %s is tried again after %r", doing, self.uri(name), error)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _explained(self, error: Exception, doing: str, name: str) -> Exception:
        where, said = self.uri(name), first_line(error)
        if _missing(error):
            return CheckpointNotFoundError(
                f"there is no {where}, or its bucket is gone: {said}; check the name, and that the bucket exists"
            )
        if _refused(error):
            return ObjectStorageError(
                f"{doing} {where} was refused: {type(error).__name__}: {said}; check the credentials that "
                f"{type(self.fs).__name__} finds, and that they may list, read, write and delete objects there"
            )
        return ObjectStorageError(
            f"{doing} {where} failed: {type(error).__name__}: {said}; check that the storage can be reached, and "
            "call again"
        )


class _StreamUpload:
    """An upload by the file object of a file system, which takes its bytes in order."""

    ordered = True

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._file = store.attempt(
            lambda: store.fs.open(store.path(name), "wb", block_size=PART), "writing", name
        )

    def send(self, number: int, data: bytes) -> None:
        """Append."""
        try:
            self._file.write(data)
        except Exception as error:  # what was taken of it is not known, so it cannot be repeated
            raise self._store._explained(error, "writing", self._name) from error

    def complete(self, size: int) -> None:
        """Close it."""
        try:
            self._file.close()
        except Exception as error:
            raise self._store._explained(error, "writing", self._name) from error

    def abort(self) -> None:
        """Leave nothing of it."""
        try:
            self._file.close()
        except Exception as error:
            logger.info("closing the abandoned %s: %r", self._store.uri(self._name), error)
        self._store.delete([self._name])


def requests_at_once() -> int:
    """The requests that this rank may have on their way at a time; each holds a part in memory."""
    ranks = detect(environment.snapshot()).local_world_size
    return max(1, min(_OF_A_RANK, _OF_A_MACHINE // ranks))


def in_parallel(call: Callable[[Any], T], items: list[Any]) -> Iterator[T]:
    """Call a function for each item, in threads; returns the results in order."""
    if len(items) < 2:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(min(requests_at_once(), len(items)), thread_name_prefix="accel-store") as pool:
        yield from pool.map(call, items)


def _file_system(root: RemotePath) -> tuple[Any, str]:
    extra = _EXTRAS.get(root.scheme)
    install = install_extra("accel-ckpt", extra or "remote")
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise MissingDependencyError(
            f"{root} is opened by fsspec, which is not installed: {install}"
        ) from error
    try:
        # Listings are never taken from a cache: other processes write there, too.
        fs, base = core.url_to_fs(str(root), use_listings_cache=False)
    except ImportError as error:
        needed = f"{_PACKAGES[extra]}, which is not installed: {install}" if extra else f"a package: {error}"
        raise MissingDependencyError(f"{root} needs {needed}") from error
    except ValueError as error:
        raise ObjectStorageError(
            f"{root} cannot be opened: {error}; give a URI of fsspec, such as s3://bucket/run, or install the package "
            "that brings its file system"
        ) from error
    return fs, str(base).rstrip("/")


def _missing(error: Exception) -> bool:
    # Azure's own, where adlfs lets it through.
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "ResourceNotFoundError"


def _refused(error: Exception) -> bool:
    status = getattr(error, "code", None) or getattr(error, "status_code", None)  # of gcsfs; of Azure
    return (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or "Credential" in type(error).__name__
        or str(error).startswith("Forbidden: ")  # gcsfs, as an OSError
    )


def _lasts(error: Exception) -> bool:
    return isinstance(error, _LASTING) or _missing(error) or _refused(error)
