"""Checkpoints and weights in object storage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_ckpt.coordination import Coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointSaveError
from accel_ckpt.folders.folder import Folder, OpenFolder
from accel_ckpt.folders.objects import listing, weights
from accel_ckpt.folders.objects.mirror import open_remote
from accel_ckpt.folders.objects.transaction import ObjectTransaction
from accel_ckpt.folders.weight_switch import Writers
from accel_ckpt.format.writer import FileRecord
from accel_ckpt.locations import RemotePath

__all__ = ["ObjectFolder"]


class ObjectFolder(Folder):
    """A folder in object storage, given by its URI."""

    def __init__(self, path: RemotePath) -> None:
        self.path = self._uri = path

    @property
    def absolute(self) -> RemotePath:
        """The URI."""
        return self._uri

    @property
    def on_this_machine(self) -> bool:
        """False: files in object storage are not on this machine."""
        return False

    def begin(
        self,
        coordinator: Coordinator,
        *,
        each_node: bool = False,
        disk: Disk = LOCAL,
        prepare: Callable[[], Any] = lambda: None,
    ) -> ObjectTransaction:
        """Look at the destination, clean up after dead saves, mark this one.

        Raises:
            CheckpointSaveError: `each_node` is set, which is for file systems that nodes do not share.
        """
        if each_node:
            raise CheckpointSaveError(
                f"{self.path} is shared by all nodes, but save_on_each_node is for folders that are not; leave it out"
            )
        transaction = ObjectTransaction(self._uri, coordinator)
        transaction.begin(prepare)
        return transaction

    def open(self, verify: bool) -> OpenFolder:
        """Open it; only parts that are read are fetched, to a folder of `tempfile` that lives as long as the result."""
        manifest, mirror, checks = open_remote(self._uri, verify)

        def checksum(name: str) -> str | None:
            expected = manifest.checksum(self._uri, name)
            return expected if verify else None

        return OpenFolder(
            directory=self._uri,
            manifest=manifest,
            files=mirror.folder,
            checks=checks,
            checksum=checksum,
            check_content=mirror.check,
        )

    def is_complete(self) -> bool:
        """Whether its manifest is readable, and every listed object exists with its size."""
        return listing.is_complete(self._uri)

    def complete_checkpoints(self, prefix: str) -> list[Path]:
        """Manifests are read in parallel."""
        return listing.complete_checkpoints(self._uri, prefix)

    def checkpoints_from(self, number: int, prefix: str) -> list[Path]:
        """List them; a folder without a manifest does not count."""
        return listing.checkpoints_from(self._uri, number, prefix)

    def prune_checkpoints(self, keep: int, prefix: str, disk: Disk) -> list[Path]:
        """Remove checkpoints: of each the manifest first, then its files."""
        return listing.prune_checkpoints(self._uri, keep, prefix)

    def check_for_weights(self) -> None:
        """One request."""
        weights.check_weights_folder(self._uri)

    def publish_weights(
        self,
        writers: Writers,
        index: tuple[str, str] | None,
        disk: Disk = LOCAL,
    ) -> tuple[str, ...]:
        """They are uploaded while they are written.

        Raises:
            CheckpointSaveError: the storage refuses, or does not answer; see `WeightSwitch.run`.
        """
        return weights.publish_weights(self._uri, writers, index)

    def write_file(self, name: str, write: Callable[[Path, Disk], FileRecord]) -> None:
        """Write one object.

        Raises:
            CheckpointSaveError: the storage refuses, or does not answer.
        """
        weights.write_object(self._uri / name, write)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """The object is fetched, and its file removed after the block."""
        mirror = weights.fetch_file(self._uri / name)
        try:
            yield mirror.folder / name
        finally:
            mirror.remove()

    def local_weights(self) -> tuple[Path, Callable[[], object]]:
        """They are fetched.

        Raises:
            CheckpointNotFoundError: there are no weights.
        """
        found, mirror = weights.fetch_weights(self._uri)
        return found, lambda: mirror.remove()  # holds the mirror, so that the files stay
