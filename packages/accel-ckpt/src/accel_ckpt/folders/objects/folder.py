"""Checkpoints and weights in object storage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from accel_ckpt.coordination.ranks import Coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ObjectStorageError,
)
from accel_ckpt.folders.folder import Folder, OpenFolder
from accel_ckpt.folders.objects import weights
from accel_ckpt.folders.objects.leftovers import (
    Mark,
    check_sizes,
    new_token,
    read_manifest,
    remove_unlisted,
    unfinished,
)
from accel_ckpt.folders.objects.mirror import open_remote
from accel_ckpt.folders.objects.store import in_parallel
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.folders.objects.transaction import ObjectTransaction
from accel_ckpt.folders.weight_switch import Writers
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.writer import FileRecord
from accel_ckpt.locations import RemotePath
from accel_state.messages import warn

__all__ = ["ObjectFolder"]

logger = logging.getLogger(__name__)


class ObjectFolder(Folder):
    """A folder in object storage, given by its URI."""

    on_this_machine = False

    def __init__(self, path: RemotePath) -> None:
        self.path = self._uri = path

    @property
    def absolute(self) -> RemotePath:
        """The URI."""
        return self._uri

    def _transaction(self, coordinator: Coordinator, each_node: bool, disk: Disk) -> ObjectTransaction:
        if each_node:
            raise CheckpointSaveError(
                f"{self.path} is shared by all nodes, but save_on_each_node is for folders that are not; leave it out"
            )
        return ObjectTransaction(self._uri, coordinator)

    def open(self, verify: bool, manifest: bytes | None = None) -> OpenFolder:
        """Open it; only parts that are read are fetched, to a folder of `tempfile` that lives as long as the result."""
        known, mirror, checks = open_remote(self._uri, verify, manifest)

        def checksum(name: str) -> str | None:
            expected = known.checksum(self._uri, name)
            return expected if verify else None

        return OpenFolder(
            directory=self._uri,
            manifest=known,
            text=(mirror.folder / MANIFEST_NAME).read_bytes(),
            files=mirror.folder,
            checks=checks,
            checksum=checksum,
            check_content=mirror.check,
        )

    def is_complete(self) -> bool:
        """Whether its manifest is readable, and every listed object exists with its size."""
        store = open_store(self._uri)
        try:
            check_sizes(store, read_manifest(store))
        except ObjectStorageError:
            raise  # then it is not known
        except CheckpointError as error:
            logger.info("%s is not a complete checkpoint: %s", self._uri, error)
            return False
        return True

    def complete_checkpoints(self, prefix: str) -> list[Path]:
        """List complete checkpoints; their manifests are read in parallel."""
        return self._those(ObjectFolder.is_complete, [name for _, name in self._numbered(prefix)])

    def checkpoints_from(self, number: int, prefix: str) -> list[Path]:
        """List checkpoints from a number on; a folder without a manifest does not count."""
        return self._those(
            ObjectFolder.has_manifest, [name for n, name in self._numbered(prefix) if n >= number]
        )

    def _those(self, are: Callable[[ObjectFolder], bool], names: list[str]) -> list[Path]:
        folders = [ObjectFolder(self._uri / name) for name in names]
        return [folder.path for folder, yes in zip(folders, in_parallel(are, folders), strict=True) if yes]

    def names(self) -> list[str]:
        """The names one level below."""
        return open_store(self._uri).children()

    def unfinished(self) -> dict[str, bool]:
        """The marks of saves and removals."""
        return unfinished(open_store(self._uri))

    def modified(self) -> float | None:
        """The time of the manifest, the last object of a save."""
        return open_store(self._uri).modified(MANIFEST_NAME)

    def has_manifest(self) -> bool:
        """Whether there is such an object."""
        try:
            open_store(self._uri).read(MANIFEST_NAME)
        except CheckpointNotFoundError:
            return False
        return True

    def prune_checkpoints(self, keep: int, prefix: str, disk: Disk) -> list[Path]:
        """Remove checkpoints: of each the manifest first, then its files.

        One rank does it, and the others do not wait for it: so what cannot be removed is a warning, and the next save
        tries again.
        """
        try:
            doomed = self.complete_checkpoints(prefix)[:-keep]
        except CheckpointError as error:
            warn(f"whether there are older checkpoints to remove in {self._uri} is not known: {error}")
            return []
        return [path for path in doomed if _prune(self._uri / path.name)]

    def check_for_weights(self) -> None:
        """Refuse a training state, with one request.

        Raises:
            CheckpointSaveError: also if the storage cannot be read.
        """
        try:
            is_state = self.has_manifest()
        except CheckpointError as error:
            raise CheckpointSaveError(f"saving weights to {self._uri} failed: {error}") from error
        if is_state:
            raise CheckpointSaveError(
                f"{self._uri} is a training state, whose files are listed in its {MANIFEST_NAME}; save the model to "
                "another folder"
            )

    def publish_weights(
        self, writers: Writers, index: tuple[str, str] | None, disk: Disk = LOCAL
    ) -> tuple[str, ...]:
        """Replace the weights; files are uploaded while they are written.

        Raises:
            CheckpointSaveError: the storage refuses, or does not answer; see `WeightSwitch.run`.
        """
        return weights.ObjectSwitch(self._uri, writers, index).run()

    def write_file(self, name: str, write: Callable[[Path, Disk], FileRecord]) -> None:
        """Write one object.

        Raises:
            CheckpointSaveError: the storage refuses, or does not answer.
        """
        try:
            weights.upload(open_store(self._uri), {name: write})
        except CheckpointSaveError:
            raise
        except CheckpointError as error:
            raise CheckpointSaveError(f"saving {self._uri / name} failed: {error}") from error

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Context with a fetched copy of an object, which is removed after the block."""
        mirror = weights.fetch_file(self._uri / name)
        try:
            yield mirror.folder / name
        finally:
            mirror.remove()

    def local_weights(self) -> tuple[Path, Callable[[], object]]:
        """Fetch the weights to this machine.

        Raises:
            CheckpointNotFoundError: there are no weights.
        """
        found, mirror = weights.fetch_weights(self._uri)
        return found, lambda: mirror.remove()  # holds the mirror, so that the files stay


def _prune(checkpoint: RemotePath) -> bool:
    mark = Mark(checkpoint, new_token())
    try:
        mark.write()
        open_store(checkpoint).delete([MANIFEST_NAME])
        remove_unlisted(checkpoint, set())
        mark.remove()
    except CheckpointError as error:
        # From one place and with one text for each checkpoint, so that Python says it once.
        warn(
            f"the older checkpoint {checkpoint} could not be removed, and stays, whole or in part: {error}. Every save "
            "tries again",
            once=True,
        )
        return False
    return True
