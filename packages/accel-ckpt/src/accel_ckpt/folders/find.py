"""Finding and removing the numbered checkpoints in a folder, local or in object storage."""

from __future__ import annotations

import os
from pathlib import Path

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.folders.folder import Folder
from accel_ckpt.folders.local import LocalFolder
from accel_ckpt.locations import RemotePath, location

__all__ = ["checkpoints_from", "complete_checkpoints", "find_folder", "prune_checkpoints"]


def find_folder(place: str | os.PathLike[str]) -> Folder:
    """Return the folder object for a path or URI, local or in object storage.

    Raises:
        ValueError: the URI names no bucket, or has ``..``.
    """
    path = location(place)
    if isinstance(path, RemotePath):
        from accel_ckpt.folders.objects.folder import ObjectFolder  # nothing else needs fsspec

        return ObjectFolder(path)
    return LocalFolder(path)


def complete_checkpoints(base: str | os.PathLike[str], prefix: str = "checkpoint_") -> list[Path]:
    """List the complete checkpoints ``<prefix><number>`` in a folder, oldest first.

    They are sorted by number, not by time. A checkpoint is complete if its manifest is readable and every listed file
    exists with its size. Incomplete ones are left out.
    """
    return find_folder(base).complete_checkpoints(prefix)


def checkpoints_from(base: str | os.PathLike[str], number: int, prefix: str = "checkpoint_") -> list[Path]:
    """List everything named ``<prefix><n>`` with n of at least ``number``, complete or not, in rising order.

    Beside one of these, a new checkpoint ``number`` would count as the older one: it would be pruned first, and never
    be the newest.
    """
    return find_folder(base).checkpoints_from(number, prefix)


def prune_checkpoints(
    base: str | os.PathLike[str], keep: int, prefix: str = "checkpoint_", *, disk: Disk = LOCAL
) -> list[Path]:
    """Remove the oldest complete checkpoints until ``keep`` are left. Call it on one rank, after a save.

    A half-removed checkpoint never counts as one. A checkpoint that cannot be removed is named in a warning; the next
    call, or the next save, tries again.

    Returns:
        The removed checkpoints.

    Raises:
        ValueError: ``keep`` is less than one.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    return find_folder(base).prune_checkpoints(keep, prefix, disk)
