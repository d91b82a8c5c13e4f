"""Checkpoints and weights in folders of a file system."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from accel_ckpt.coordination.ranks import Coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from accel_ckpt.folders.folder import Folder, OpenFolder
from accel_ckpt.folders.leftovers import (
    TemporaryFolder,
    abandoned,
    host_token,
    locked,
    remove_or_warn,
    restore_interrupted_swaps,
    temporary_name,
    unfinished,
)
from accel_ckpt.folders.local_transaction import LocalTransaction, link_or_copy
from accel_ckpt.folders.weight_switch import WeightSwitch, Writers
from accel_ckpt.format.index import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.saved_tensors import FileChecks
from accel_ckpt.format.writer import FileRecord, write_bytes
from accel_state.messages import warn

__all__ = ["LocalFolder"]

logger = logging.getLogger(__name__)

_PART = re.compile(r"\.(.+)\.part-[0-9a-f]{12}")
_DEAD = 600  # seconds without a write
_WEIGHTS = "weights"  # in the names of hidden folders of weights that are being saved


class LocalFolder(Folder):
    """A folder of a file system of this machine."""

    on_this_machine = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def absolute(self) -> Path:
        """The path from the root; a link stays one."""
        return Path(os.path.abspath(self.path))

    def _transaction(self, coordinator: Coordinator, each_node: bool, disk: Disk) -> LocalTransaction:
        return LocalTransaction(self.absolute, coordinator, each_node, disk)

    def open(self, verify: bool, manifest: bytes | None = None) -> OpenFolder:
        """Open the checkpoint; its files are read in place."""
        folder = self.absolute
        text = self._text() if manifest is None else manifest
        known = Manifest.decode(text, str(folder / MANIFEST_NAME))
        if manifest is None:
            known.check_sizes(folder)

        def checksum(name: str) -> str | None:
            expected = known.checksum(folder, name)
            return expected if verify else None

        return OpenFolder(
            directory=folder,
            manifest=known,
            text=text,
            files=known.home(folder),
            checks=FileChecks(checksum),
            checksum=checksum,
            check_content=partial(known.check_content, folder),
        )

    def _text(self) -> bytes:
        restore_interrupted_swaps(self.absolute.parent)
        try:
            return Manifest.text(self.absolute)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}{_nearby(self.absolute)}") from None

    def is_complete(self) -> bool:
        """Whether its manifest is readable, and every listed file exists with its size."""
        try:
            Manifest.read(self.path).check_sizes(self.path)
        except CheckpointError as error:
            logger.info("%s is not a complete checkpoint: %s", self.path, error)
            return False
        return True

    def complete_checkpoints(self, prefix: str) -> list[Path]:
        """List complete checkpoints; a swap that was interrupted is undone first."""
        restore_interrupted_swaps(self.path)
        paths = [self.path / name for _, name in self._numbered(prefix)]
        return [path for path in paths if LocalFolder(path).is_complete()]

    def checkpoints_from(self, number: int, prefix: str) -> list[Path]:
        """List checkpoints, complete or not, from a number on."""
        return [self.path / name for found, name in self._numbered(prefix) if found >= number]

    def has_manifest(self) -> bool:
        """Whether there is such a file."""
        return (self.path / MANIFEST_NAME).exists()

    def modified(self) -> float:
        """The time of the manifest, the last file of a save."""
        return (self.path / MANIFEST_NAME).stat().st_mtime

    def names(self) -> list[str]:
        """The names in the folder."""
        return os.listdir(self.path) if self.path.is_dir() else []

    def unfinished(self) -> dict[str, bool]:
        """Temporary folders; those of running saves on this machine are locked."""
        return unfinished(self.path) if self.path.is_dir() else {}

    def prune_checkpoints(self, keep: int, prefix: str, disk: Disk) -> list[Path]:
        """Rename each checkpoint before its files are removed, so that no half of one is taken for a checkpoint."""
        try:
            doomed = self.complete_checkpoints(prefix)[:-keep]
        except OSError as error:  # such as a manifest of another user
            warn(
                f"no older checkpoint in {self.path} was removed: {error}. Every save tries again", once=True
            )
            return []
        return [path for path in doomed if _prune(path, disk)]

    def check_for_weights(self) -> None:
        """Refuse a file and a training state; a folder that does not exist yet is fine."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointSaveError(f"{self.path} is a file; weights go to a folder, choose another name")
        if self.has_manifest():
            raise CheckpointSaveError(
                f"{self.path} is a training state, whose files are listed in its {MANIFEST_NAME}; save the model "
                "to another folder"
            )

    def publish_weights(
        self, writers: Writers, index: tuple[str, str] | None, disk: Disk = LOCAL
    ) -> tuple[str, ...]:
        """Replace the weights in the folder, which is created if needed; a mapped old file stays readable."""
        return _LocalSwitch(self.path, writers, index, disk).run()

    def write_file(self, name: str, write: Callable[[Path, Disk], FileRecord]) -> None:
        """Replace a file when its new content is complete, and remove what killed saves of it left.

        Raises:
            CheckpointSaveError: writing failed.
        """
        place = self.path / name
        folder = TemporaryFolder(temporary_name(place, host_token(secrets.token_hex(6))))
        try:
            for dead in abandoned(self.path, folder.path.stat().st_mtime):
                if dead.name.startswith(f".{name}.saving-"):
                    remove_or_warn(dead)
            write(folder.path / name, LOCAL)
            LOCAL.rename(folder.path / name, place)
        except OSError as error:
            if error.filename is not None or isinstance(error, CheckpointError):
                raise
            raise CheckpointSaveError(
                f"saving {place} failed: {error}; what was there before is unchanged"
            ) from error
        finally:
            remove_or_warn(folder.path)
            folder.release()
        LOCAL.sync_directory(self.path)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """The file itself, whether it is there or not."""
        yield self.path / name

    def local_weights(self) -> tuple[Path, Callable[[], object]]:
        """The path itself, which nothing removes."""
        return self.path, lambda: None


def _prune(path: Path, disk: Disk) -> bool:
    trash = temporary_name(path, host_token(secrets.token_hex(6)))
    try:
        with locked(path):  # so that no save treats it as a dead one's
            disk.rename(path, trash)
            return remove_or_warn(trash, disk)
    except OSError as error:
        if not path.exists():  # another process was faster
            return False
        # From one place and with one text for each checkpoint, so that Python says it once.
        warn(
            f"the older checkpoint {path} could not be removed, and stays: {error}. Every save tries again",
            once=True,
        )
        return False


class _LocalSwitch(WeightSwitch):
    """A replacement of weights; the new files are written to a hidden folder, which is locked meanwhile."""

    def __init__(self, path: Path, writers: Writers, index: tuple[str, str] | None, disk: Disk) -> None:
        super().__init__(path, writers, index)
        self.disk = disk
        self._scratch = temporary_name(path / _WEIGHTS, host_token(secrets.token_hex(6)))

    def run(self) -> tuple[str, ...]:
        """Replace the weights; leftovers of killed saves are removed before, for room, and if still in use, after."""
        folder = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            folder = TemporaryFolder(self._scratch, self.disk)
            self._now = self._scratch.stat().st_mtime
            self._remove_dead()
            return super().run()
        except OSError as error:
            raise error if isinstance(error, CheckpointError) else self._failure(error) from error
        finally:
            if folder is not None:
                folder.release()
                self._remove_dead(self._scratch)

    def there(self) -> set[str]:
        """Files of weights, and parts of such files that a killed save of an older version left."""
        paths = [
            path for path in self.path.iterdir() if is_weight_file(path.name) or self._is_dead_part(path)
        ]
        return {path.name for path in paths if path.is_file()}

    def _is_dead_part(self, path: Path) -> bool:
        match = _PART.fullmatch(path.name)
        return match is not None and is_weight_file(match[1]) and self._now - path.stat().st_mtime > _DEAD

    def read(self, name: str) -> bytes:
        """Read a file."""
        return (self.path / name).read_bytes()

    def put(self, name: str, text: str) -> None:
        """Rename a new file."""
        self.doing = f"writing {name}"
        write_bytes(self._scratch / name, text.encode(), self.disk)
        self.disk.rename(self._scratch / name, self.path / name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.disk.unlink(self.path / name)

    def remove_old(self, names: Sequence[str]) -> None:
        """Remove files, each by itself."""
        for name in names:
            try:
                self.remove(name)
            except OSError as error:
                warn(
                    f"{self.path / name} is of an earlier save and could not be removed, so it stays: {error}",
                    once=True,
                )

    def write(self, apart: bool) -> str:
        """Write them to the hidden folder."""
        for name, write in self.writers.items():
            self.doing = f"writing {name}"
            write(self._scratch / name, self.disk)
        self.disk.sync_directory(self._scratch)
        self._apart = apart
        return self._scratch.name

    def give_names(self) -> bool:
        """Rename them; files that an index names here get second names."""
        for name in self.writers:
            self.doing = f"naming {name}"
            source = self._scratch / name
            if self._apart:
                source = self._scratch / f"{name}.named"
                link_or_copy(self._scratch / name, source, self.disk)
            self.disk.rename(source, self.path / name)
        return True

    def sync(self) -> None:
        """Return when names are on the disk."""
        self.disk.sync_directory(self.path)

    def _remove_dead(self, *own: Path) -> None:
        used = {file for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME) for file in self.used(index)}
        for folder in (*own, *abandoned(self.path, self._now)):
            is_used = any(file.startswith(f"{folder.name}/") for file in used)
            if folder.name.startswith(f".{_WEIGHTS}.") and not is_used:
                remove_or_warn(folder, self.disk)


def _nearby(folder: Path) -> str:
    """A hint for a wrong path: the newest checkpoint in the nearest folder that exists."""
    near = next(place for place in (folder, *folder.parents) if place.is_dir())
    try:
        found = [path for path in near.iterdir() if (path / MANIFEST_NAME).is_file()]
        found.sort(key=lambda path: (path / MANIFEST_NAME).stat().st_mtime, reverse=True)
    except OSError:  # the folder of another user, or one that is being cleaned up
        return ""
    newest = next((path for path in found if LocalFolder(path).is_complete()), None)
    if newest is not None:
        return f"; the newest complete checkpoint in {near} is {newest.name}"
    if near in (folder, folder.parent):
        return ""
    return f"; the nearest folder that exists is {near}"
