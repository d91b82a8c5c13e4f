"""The commit protocol where there are no renames: a checkpoint exists when its manifest does.

mark → every rank uploads its files, to a folder of this save → all ranks report → the leading rank looks whether all
are there → manifest, in one request → what it replaces is removed → the mark is removed. Pruning comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from accel_ckpt.coordination.ranks import Coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    ObjectStorageError,
)
from accel_ckpt.folders.folder import Contribution, Transaction, check_regular, files_below
from accel_ckpt.folders.objects.leftovers import (
    Mark,
    clean_leftovers,
    files_folder,
    new_token,
    read_manifest,
    remove_unlisted,
)
from accel_ckpt.folders.objects.scratch import Scratch
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.folders.objects.uploads import UploadDisk
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.writer import FileRecord, FileWriter
from accel_ckpt.locations import RemotePath
from accel_state.messages import warn

__all__ = ["ObjectTransaction"]


class ObjectTransaction(Transaction):
    """One rank's part in a commit to object storage; the leading rank is rank 0.

    The scratch is a folder of this rank on this machine. What save hooks write there is uploaded; the files of the
    checkpoint are never in it, because `disk` uploads them while they are written.

    Args:
        directory: the URI.
        coordinator: the ranks.
    """

    runs_thread_pools = True

    def __init__(self, directory: RemotePath, coordinator: Coordinator) -> None:
        super().__init__(directory, new_token(), coordinator.rank == 0, coordinator, LOCAL)
        self._remote = directory
        self._folder: Scratch | None = None
        self._uploads: UploadDisk | None = None
        self._marked = False
        self._uncertain = False

    def abort(self) -> None:
        """Remove what this rank uploaded, unless the checkpoint is complete. Not collective."""
        uploads, self._uploads = self._uploads, None
        folder, self._folder = self._folder, None
        try:
            if uploads is not None:
                if self._complete or self._uncertain:
                    uploads.release()
                else:
                    uploads.discard()
            if (
                self._marked
                and not self._complete
                and not self._uncertain
                and self.coordinator.world_size == 1
            ):
                self._mark.remove()  # the files of other ranks may still be there: then the next save removes it
                self._marked = False
        except CheckpointError as error:
            warn(f"the uploaded objects of {self.directory} could not be removed, a later save will: {error}")
        if folder is not None:
            folder.remove()

    @property
    def _mark(self) -> Mark:
        return Mark(self._remote, self.token)

    @property
    def _prefix(self) -> str:
        return f"{files_folder(self.token)}/"

    def _open(self) -> None:
        self._store = open_store(self._remote)
        self._folder = Scratch()
        if self.leader:
            self._check_destination()
            clean_leftovers(self._remote)
            self._mark.write()
            self._marked = True

    def _check_destination(self) -> None:
        try:
            read_manifest(self._store)
        except CheckpointNotFoundError:
            return
        except CorruptCheckpointError as error:
            raise CheckpointSaveError(
                f"{self.directory} holds a {MANIFEST_NAME} that cannot be read, so it is unknown what would be "
                f"replaced; remove it, or choose another name. {error}"
            ) from error

    def _join(self, token: str) -> None:
        assert self._folder is not None, "opened before"
        self.token = token
        self.scratch = self._folder.folder
        self.disk = self._uploads = UploadDisk(self._store, self.scratch, self._prefix)

    def _write(self, write: Callable[[Path], Contribution]) -> Contribution:
        uploads = self._uploads
        assert uploads is not None, "begun, and not aborted"
        written = write(self.scratch)
        files = {**self._added(written.files, uploads), **written.files}
        uploads.drain()
        blocks = uploads.blocks
        return replace(written, files={n: replace(record, blocks=blocks[n]) for n, record in files.items()})

    def _added(self, written: Mapping[str, FileRecord], uploads: UploadDisk) -> dict[str, FileRecord]:
        """Upload what hooks put into this rank's folder."""
        records = {}
        for name in files_below(self.scratch):
            check_regular(self.scratch / name)
            if name in written or name == MANIFEST_NAME:
                raise CheckpointSaveError(
                    f"a save hook wrote {name}, which is a file of the checkpoint; give it another name"
                )
            records[name] = _copy(self.scratch / name, uploads)
        return records

    def _publish(self, parts: Sequence[Contribution]) -> None:
        files: dict[str, FileRecord] = {}
        for part in parts:
            for name, record in part.files.items():
                if files.setdefault(name, record).xxh3 != record.xxh3:
                    raise CheckpointSaveError(
                        f"save hooks of several ranks wrote different files {name} for {self.directory}; write on one "
                        "rank, or put the rank into the name"
                    )
        ranks = tuple(rank for rank, part in enumerate(parts) if part.files)
        manifest = Manifest(
            self.coordinator.world_size,
            ranks,
            self._models(files),
            files,
            files_folder(self.token),
            self._own.layout,
        )
        self._check_arrived(files)
        self._write_manifest(manifest.encode())
        self._clean()

    def _check_arrived(self, files: Mapping[str, FileRecord]) -> None:
        found = self._store.sizes(files_folder(self.token))
        for name, record in files.items():
            if found.get(self._prefix + name) != record.size:
                raise ObjectStorageError(
                    f"{self._store.uri(self._prefix + name)} was uploaded with {record.size} bytes and has "
                    f"{found.get(self._prefix + name, 'none')}; another process writes there, or the storage lost it"
                )

    def _write_manifest(self, text: bytes) -> None:
        """Write the manifest; a request whose answer is lost may still have done it, or do it later."""
        try:
            self._uncertain = True
            self._store.put(MANIFEST_NAME, text)
        except (ObjectStorageError, CheckpointNotFoundError) as error:
            if isinstance(error.__cause__, (PermissionError, FileNotFoundError)):
                self._uncertain = False  # refused
                raise
            try:
                if self._store.read(MANIFEST_NAME) == text:
                    return
            except (ObjectStorageError, CheckpointNotFoundError):
                raise error from None
            raise

    def _clean(self) -> None:
        """Remove what the new manifest does not list: the files of the checkpoint that it replaced."""
        try:
            remove_unlisted(self._remote, set())
            self._mark.remove()
        except CheckpointError as error:
            warn(
                f"the checkpoint {self.directory} is saved, but what it replaces could not be removed: {error}"
            )


def _copy(path: Path, disk: Disk) -> FileRecord:
    with open(path, "rb") as source, FileWriter(path, disk) as target:
        while chunk := source.read(1 << 22):
            target.write(chunk)
        return target.finish()
