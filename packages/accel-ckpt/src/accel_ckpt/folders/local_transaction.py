"""The commit of a folder of a file system: a checkpoint has its name only when it is complete.

temporary sibling → every rank writes, each file hashed and fsynced → all ranks report → manifest → fsync of
the folder → rename, or swap with the folder that is there → fsync of the parent. Pruning older checkpoints
comes after.

An existing folder is replaced as a whole, in one step: on Linux the two folders swap names (``renameat2``);
where that does not exist, the old folder is renamed away and the new one renamed in, and the next reader or writer
undoes a swap that was interrupted between the two. Files in the old folder that no save of ours wrote are
carried over; a name that both want is an error, raised before anything is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_ckpt.coordination.ranks import Coordinator
from accel_ckpt.disk import Disk
from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from accel_ckpt.folders.folder import Contribution, Transaction, check_regular, files_below
from accel_ckpt.folders.leftovers import (
    TemporaryFolder,
    clean_leftovers,
    host_token,
    locked,
    previous_name,
    restore_interrupted_swaps,
    temporary_name,
)
from accel_ckpt.format.index import inside
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.reader import file_digest
from accel_ckpt.format.state_files import is_state_file
from accel_ckpt.format.writer import FileRecord
from accel_state.messages import readable_size, warn

__all__ = ["LocalTransaction", "link_or_copy"]

logger = logging.getLogger(__name__)

# Seconds to wait for another save that is just replacing the same folder. Removing the old one is all it has to do.
_PATIENCE = 30.0


class LocalTransaction(Transaction):
    """One rank's part in a commit; the scratch folder is a hidden one beside the final folder, which all ranks see.

    Args:
        directory: the final path, absolute; the same on every rank, or with `each_node` on every rank of a node.
        coordinator: the ranks.
        each_node: one rank of every node commits a folder of its node.
        disk: the file system to write to.
    """

    def __init__(self, directory: Path, coordinator: Coordinator, each_node: bool, disk: Disk) -> None:
        leader = coordinator.local_rank == 0 if each_node else coordinator.rank == 0
        token = host_token(secrets.token_hex(6))
        if each_node:  # by one name on all nodes, leaders notice that the nodes share a file system
            token = coordinator.exchange(token)[0]
        if directory.is_symlink():
            directory = directory.resolve()
        super().__init__(directory, token, leader, coordinator, disk)
        self._join(token)
        self._folder: TemporaryFolder | None = None
        self._keep = False

    def abort(self) -> None:
        """Remove the temporary folder, if it still has that name, and release its lock. Not collective."""
        if self._folder is None:
            return
        if self.scratch.exists() and not self._keep:
            try:
                self.disk.remove_tree(self.scratch)
            except OSError as error:
                warn(f"{self.scratch} could not be removed, the next save will: {error}")
        self._folder.release()
        self._folder = None

    def _open(self) -> None:
        if not self.leader:
            return
        _make_folders(self.directory.parent, self.disk)
        restore_interrupted_swaps(self.directory.parent, self.disk)
        _check_destination(self.directory)
        try:
            self._folder = TemporaryFolder(self.scratch, self.disk)
        except FileExistsError as error:
            raise CheckpointSaveError(
                f"{self.scratch} was made by another rank of this save: the nodes share this file "
                "system, so save without save_on_each_node"
            ) from error
        clean_leftovers(self.directory.parent, self.scratch.stat().st_mtime, self.disk)

    def _room(self, error: OSError) -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        needs = [] if self.nbytes is None else [f"this rank writes {readable_size(self.nbytes)}"]
        if error.errno == errno.EDQUOT:
            needs.append("and the quota of this user is used up")
        else:
            with contextlib.suppress(OSError):  # what this save has written so far will be removed
                written = sum(path.stat().st_blocks * 512 for path in self.scratch.glob("*"))
                free = shutil.disk_usage(self.directory.parent).free + written
                needs.append(
                    f"{readable_size(free)} were free for all ranks on the disk of {self.directory.parent}"
                )
        listed = ", ".join(needs)
        return (
            f". {listed[:1].upper()}{listed[1:]}. A save needs room beside the checkpoints that it will replace: "
            "remove some, keep fewer (total_limit), or save to another disk"
        )

    def _join(self, token: str) -> None:
        self.token = token
        self.scratch = temporary_name(self.directory, token)

    def _write(self, write: Callable[[Path], Contribution]) -> Contribution:
        if not self.scratch.is_dir():
            raise CheckpointSaveError(
                f"the folder {self.scratch} that the main process made is not visible here; save to a file "
                "system that all nodes share, or save on each node (save_on_each_node=True)"
            )
        return write(self.scratch)

    def _publish(self, parts: Sequence[Contribution]) -> None:
        # With a folder on each node, leading ranks of other nodes have files of the same names.
        files = {**_visible_files(self.scratch, parts), **self._own.files}
        files |= _unreported_files(self.scratch, files, self.disk)
        ranks = tuple(r for r, part in enumerate(parts) if part.files and set(part.files) <= set(files))
        models = self._models(files)
        manifest = Manifest(self.coordinator.world_size, ranks, models, files, layout=self._own.layout)
        manifest.write(self.scratch, self.disk)
        carried: set[str] = set()
        # Each is refused when another save, or a pruning, of the same name was faster.
        while not self._take_a_free_name() and not self._replace(carried):
            pass

    def _take_a_free_name(self) -> bool:
        if self.directory.exists():
            return False
        _sync_tree(self.scratch, self.disk)
        try:
            self.disk.rename(self.scratch, self.directory)
        except OSError:
            if not self.directory.exists():
                raise
            return False  # another save has taken it since
        self._sync_parent(None)
        return True

    def _replace(self, carried: set[str]) -> bool:
        try:
            # Two saves of one name come one after the other. The lock goes with the old folder, so that no other save
            # treats it as a dead one's while it is removed.
            with locked(self.directory, _PATIENCE):
                _carry_over(self.directory, self.scratch, carried, self.disk)
                _sync_tree(self.scratch, self.disk)
                old = swap(self.scratch, self.directory, self.disk)
                self._sync_parent(old)
                self._discard(old, carried)
        except FileNotFoundError:
            if self.directory.exists() or not self.scratch.exists():
                raise
            return False  # it has been pruned since
        return True

    def _sync_parent(self, old: Path | None) -> None:
        try:
            self.disk.sync_directory(self.directory.parent)
        except OSError:
            # The new names may not survive a power cut: go back to the state that surely does.
            if old is None:
                self.disk.rename(self.directory, self.scratch)
            else:
                self._swap_back(old)
            raise

    def _swap_back(self, old: Path) -> None:
        rejected = swap(old, self.directory, self.disk)
        if rejected != self.scratch:
            self.disk.rename(rejected, self.scratch)

    def _discard(self, old: Path, carried: set[str]) -> None:
        try:
            _rescue(old, self.directory, carried, self.disk)
            self.disk.remove_tree(old)
        except OSError as error:
            self._keep = old.exists()
            warn(f"the checkpoint is saved, but the old one could not be removed from {old}: {error}")


def _make_folders(folder: Path, disk: Disk) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        disk.sync_directory(path.parent)


def _check_destination(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointSaveError(f"{directory} is a file; a checkpoint is a folder, choose another name")
    mounted = os.path.ismount(directory)
    if mounted or Path.cwd().resolve().is_relative_to(directory.resolve()):
        kind = "a mount point" if mounted else "the current working folder, or above it"
        raise CheckpointSaveError(
            f"{directory} is {kind}, and a checkpoint replaces its folder as a whole; save to a folder inside "
            f"it, such as {directory / 'checkpoint'}"
        )


def _visible_files(folder: Path, parts: Sequence[Contribution]) -> dict[str, FileRecord]:
    return {
        name: record for part in parts for name, record in part.files.items() if inside(folder, name).exists()
    }


def _unreported_files(folder: Path, reported: Mapping[str, Any], disk: Disk) -> dict[str, FileRecord]:
    """The files that hooks added."""
    records = {}
    for name in files_below(folder):
        if name in reported:
            continue
        path = folder / name
        check_regular(path)
        descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
        try:
            disk.fsync(descriptor)
        finally:
            os.close(descriptor)
        records[name] = FileRecord(path.stat().st_size, file_digest(path))
    return records


def _own_files(directory: Path, new: Path) -> set[str]:
    """The files of our last save in a folder that a new one replaces; none if it is not ours.

    A manifest could list any file, so files of hooks are replaced by others of their names, and else carried over.
    """
    if not (directory / MANIFEST_NAME).is_file():
        return set()
    try:
        listed = Manifest.read(directory).files
        return {MANIFEST_NAME, *(name for name in listed if is_state_file(name) or (new / name).exists())}
    except CheckpointNotFoundError:  # it has been pruned since
        raise
    except CheckpointError as error:
        raise CheckpointSaveError(
            f"{directory} holds a {MANIFEST_NAME} that cannot be read, so it is unknown which of its files "
            f"may be replaced; remove the folder, or choose another name. {error}"
        ) from error


def _carry_over(directory: Path, temporary: Path, carried: set[str], disk: Disk) -> None:
    """Give the other files of the old folder a second name in the new one, and add them to ``carried``."""
    own = _own_files(directory, temporary)
    foreign = {name for name in files_below(directory) if name not in own} - carried
    clashes = sorted(name for name in foreign if (temporary / name).exists())
    if clashes:
        raise CheckpointSaveError(
            f"{directory} holds files that no save of a training state wrote and that this one would replace: "
            f"{', '.join(clashes)}; move them, or choose another folder"
        )
    for name in sorted(foreign):
        carried.add(name)
        source, target = directory / name, temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
            continue
        link_or_copy(source, target, disk)
    shutil.copymode(directory, temporary)


def link_or_copy(source: Path, target: Path, disk: Disk) -> None:
    """Give a file a second name, or copy it where the file system cannot."""
    try:
        disk.link(source, target)
    except OSError as error:
        logger.info("%s is copied, because it cannot be linked: %s", source, error)
        shutil.copy2(source, target)
        with open(target, "rb+") as copied:
            disk.fsync(copied.fileno())


def _rescue(old: Path, directory: Path, carried: set[str], disk: Disk) -> None:
    """Move over what appeared in the old folder while it was being replaced."""
    known = carried | _own_files(old, directory)
    for name in files_below(old):
        target = directory / name
        if name not in known and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            disk.rename(old / name, target)


def _sync_tree(folder: Path, disk: Disk) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        disk.sync_directory(Path(root))


def swap(new: Path, directory: Path, disk: Disk) -> Path:
    """Replace an existing folder, whose lock is held, by ``new``; returns the new path of the old one."""
    if disk.exchange(new, directory):
        return new
    old = previous_name(directory, new.name.partition(".saving-")[2] or host_token(secrets.token_hex(6)))
    disk.rename(directory, old)
    try:
        disk.rename(new, directory)
    except OSError:
        if directory.exists():
            # Another save took the free name between the two steps: its folder is the old one now.
            disk.remove_tree(old)
            return swap(new, directory, disk)
        disk.rename(old, directory)
        raise
    return old
