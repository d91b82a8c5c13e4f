"""The checkpoints ``<prefix><number>`` of a folder or of object storage: which are complete, and pruning old ones."""

from __future__ import annotations

import logging
import os
import re
import secrets
import warnings
from pathlib import Path

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointError
from accel_ckpt.folders.leftovers import (
    host_token,
    locked,
    remove_or_warn,
    restore_interrupted_swaps,
    temporary_name,
)
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.locations import RemotePath, location

__all__ = ["checkpoints_from", "complete_checkpoints", "is_complete", "prune_checkpoints"]

logger = logging.getLogger(__name__)


def complete_checkpoints(base: str | os.PathLike[str], prefix: str = "checkpoint_") -> list[Path]:
    """The complete checkpoints ``<prefix><number>`` of a folder, oldest first.

    The order is that of the numbers; times do not matter. Complete means: a readable manifest, and every file
    that it lists with its size. Folders that are not complete are left out.
    """
    base = location(base)
    if isinstance(base, RemotePath):
        from accel_ckpt.folders.objects import listing

        return listing.complete_checkpoints(base, prefix)
    if not base.is_dir():
        return []
    restore_interrupted_swaps(base)
    return [path for _, path in _numbered(base, prefix) if is_complete(path)]


def checkpoints_from(base: str | os.PathLike[str], number: int, prefix: str = "checkpoint_") -> list[Path]:
    """Whatever is called ``<prefix><n>`` with n of at least ``number``, complete or not, in rising order.

    A new checkpoint ``number`` beside one of these would be taken for the older one: pruned first, never the newest.
    """
    base = location(base)
    if isinstance(base, RemotePath):
        from accel_ckpt.folders.objects import listing

        return listing.checkpoints_from(base, number, prefix)
    return [path for found, path in _numbered(base, prefix) if found >= number]


def _numbered(base: Path, prefix: str) -> list[tuple[int, Path]]:
    if not base.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    return sorted(
        (int(match.group(1)), path) for path in base.iterdir() if (match := pattern.fullmatch(path.name))
    )


def is_complete(directory: Path) -> bool:
    """Whether a folder is a complete checkpoint of this library."""
    try:
        Manifest.read(directory).check_sizes(directory)
    except CheckpointError as error:
        logger.info("%s is not a complete checkpoint: %s", directory, error)
        return False
    return True


def prune_checkpoints(
    base: str | os.PathLike[str], keep: int, prefix: str = "checkpoint_", *, disk: Disk = LOCAL
) -> list[Path]:
    """Remove the oldest complete checkpoints until ``keep`` are left. Call it on one rank, after a commit.

    Each is renamed before its files go, so that a checkpoint half removed is never taken for one. What cannot be
    removed is a warning that names it; it stays, and the next call, or the next save, tries again.

    Returns:
        What was removed.

    Raises:
        ValueError: ``keep`` is less than one.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    base = location(base)
    if isinstance(base, RemotePath):
        from accel_ckpt.folders.objects import listing

        return listing.prune_checkpoints(base, keep, prefix)
    try:
        doomed = complete_checkpoints(base, prefix)[:-keep]
    except OSError as error:  # such as a manifest of another user
        warnings.warn(
            f"no older checkpoint in {base} was removed: {error}. Every save tries again", stacklevel=1
        )
        return []
    return [path for path in doomed if _prune(path, disk)]


def _prune(path: Path, disk: Disk) -> bool:
    trash = temporary_name(path, host_token(secrets.token_hex(6)))
    try:
        with locked(path):  # so that no save treats it as a dead one's
            disk.rename(path, trash)
            return remove_or_warn(trash, disk)
    except OSError as error:
        # From one place and with one text for each checkpoint, so that Python says it once.
        warnings.warn(
            f"the older checkpoint {path} could not be removed, and stays: {error}. Every save tries again",
            stacklevel=1,
        )
        return False
