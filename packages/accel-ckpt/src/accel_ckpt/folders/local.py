"""Checkpoints and weights in folders of a file system."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accel_ckpt.coordination import Coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from accel_ckpt.folders.folder import Folder, OpenFolder
from accel_ckpt.folders.leftovers import (
    host_token,
    locked,
    remove_or_warn,
    restore_interrupted_swaps,
    temporary_name,
)
from accel_ckpt.folders.local_transaction import LocalTransaction
from accel_ckpt.format.index import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.saved_tensors import FileChecks
from accel_ckpt.format.writer import FileRecord, replace_file, write_bytes
from accel_state.messages import warn

__all__ = ["LocalFolder"]

logger = logging.getLogger(__name__)

_PART = re.compile(r"\.(.+)\.part-[0-9a-f]{12}")
_DEAD = 600  # seconds without a write


class LocalFolder(Folder):
    """A folder of a file system of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def absolute(self) -> Path:
        """The path from the root; a link stays one."""
        return Path(os.path.abspath(self.path))

    @property
    def on_this_machine(self) -> bool:
        """True: a file system's path is on this machine."""
        return True

    def begin(
        self,
        coordinator: Coordinator,
        *,
        each_node: bool = False,
        disk: Disk = LOCAL,
        prepare: Callable[[], Any] = lambda: None,
    ) -> LocalTransaction:
        """Check the destination, clean up after dead saves, make the temporary folder."""
        transaction = LocalTransaction(self.absolute, coordinator, each_node, disk)
        transaction.begin(prepare, one_folder=not each_node)
        return transaction

    def open(self, verify: bool) -> OpenFolder:
        """Open the checkpoint; its files are read in place."""
        folder = self.absolute
        restore_interrupted_swaps(folder.parent)
        try:
            manifest = Manifest.read(folder)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}{_nearby(folder)}") from None
        manifest.check_sizes(folder)

        def checksum(name: str) -> str | None:
            expected = manifest.checksum(folder, name)
            return expected if verify else None

        return OpenFolder(
            directory=folder,
            manifest=manifest,
            files=manifest.home(folder),
            checks=FileChecks(checksum),
            checksum=checksum,
            check_content=partial(manifest.check_content, folder),
        )

    def is_complete(self) -> bool:
        """Whether its manifest is readable, and every listed file exists with its size."""
        try:
            Manifest.read(self.path).check_sizes(self.path)
        except CheckpointError as error:
            logger.info("%s is not a complete checkpoint: %s", self.path, error)
            return False
        return True

    def complete_checkpoints(self, prefix: str) -> list[Path]:
        """A swap that was interrupted is undone first."""
        if not self.path.is_dir():
            return []
        restore_interrupted_swaps(self.path)
        return [path for _, path in self._numbered(prefix) if LocalFolder(path).is_complete()]

    def checkpoints_from(self, number: int, prefix: str) -> list[Path]:
        """List checkpoints, complete or not, from a number on."""
        return [path for found, path in self._numbered(prefix) if found >= number]

    def _numbered(self, prefix: str) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        pattern = re.compile(re.escape(prefix) + r"(\d+)")
        matches = ((pattern.fullmatch(path.name), path) for path in self.path.iterdir())
        return sorted((int(match.group(1)), path) for match, path in matches if match)

    def prune_checkpoints(self, keep: int, prefix: str, disk: Disk) -> list[Path]:
        """Each is renamed before its files go, so that a checkpoint half removed is never taken for one."""
        try:
            doomed = self.complete_checkpoints(prefix)[:-keep]
        except OSError as error:  # such as a manifest of another user
            warn(
                f"no older checkpoint in {self.path} was removed: {error}. Every save tries again",
                once=True,
            )
            return []
        return [path for path in doomed if _prune(path, disk)]

    def check_for_weights(self) -> None:
        """A folder that is not there yet is made later."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointSaveError(f"{self.path} is a file; weights go to a folder, choose another name")
        if (self.path / MANIFEST_NAME).exists():
            raise CheckpointSaveError(
                f"{self.path} is a training state, whose files are listed in its {MANIFEST_NAME}; save the model "
                "to another folder"
            )

    def publish_weights(
        self,
        writers: Mapping[str, Callable[[Path, Disk], FileRecord]],
        index: tuple[str, str] | None,
        disk: Disk = LOCAL,
    ) -> tuple[str, ...]:
        """The folder is made if it is not there; a process that has an old file mapped keeps seeing it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for stale in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            # Without an index a half-replaced set of shards cannot be taken for a whole one.
            if (self.path / stale).is_file():
                disk.unlink(self.path / stale)
        for name, write in writers.items():
            replace_file(self.path / name, _on(disk, write), disk)
        written = [*writers]
        if index is not None:
            name, text = index
            replace_file(self.path / name, lambda path: write_bytes(path, text.encode(), disk), disk)
            written.append(name)
        self._remove_old_weights(written, disk)
        disk.sync_directory(self.path)
        return tuple(written)

    def _remove_old_weights(self, written: list[str], disk: Disk) -> None:
        now = (self.path / written[0]).stat().st_mtime
        safe = any(name.endswith(".safetensors") for name in written)
        for path in self.path.iterdir():
            is_stale = is_weight_file(path.name) and path.name not in written
            if (is_stale or _is_dead_part(path, now)) and path.is_file():
                _remove_old(path, misleads=is_stale and not safe, disk=disk)

    def write_file(self, name: str, write: Callable[[Path, Disk], FileRecord]) -> None:
        """The old content stays until the new one is complete."""
        replace_file(self.path / name, _on(LOCAL, write))

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


def _remove_old(path: Path, misleads: bool, disk: Disk) -> None:
    """Remove a file that an earlier save left.

    Raises:
        CheckpointSaveError: it stays, and readers would load it: they prefer safetensors.
    """
    try:
        disk.unlink(path)
    except OSError as error:
        if misleads and path.name.endswith(".safetensors"):
            raise CheckpointSaveError(
                f"the new weights are in {path.parent}, but readers choose the old {path.name}, which could not be "
                f"removed: {error}. Remove it, or save to another folder"
            ) from error
        warn(f"{path} is of an earlier save and could not be removed, so it stays: {error}", once=True)


def _on(disk: Disk, write: Callable[[Path, Disk], FileRecord]) -> Callable[[Path], FileRecord]:
    return lambda path: write(path, disk)


def _is_dead_part(path: Path, now: float) -> bool:
    """Whether a killed save left this part of a file of weights: it has not been written to for a while."""
    match = _PART.fullmatch(path.name)
    if match is None or not is_weight_file(match[1]):
        return False
    return now - path.stat().st_mtime > _DEAD


def _nearby(folder: Path) -> str:
    """Which checkpoint a wrong path may have meant: the newest in the nearest folder that exists."""
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
