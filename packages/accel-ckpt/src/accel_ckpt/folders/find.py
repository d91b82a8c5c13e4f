"""Which kind of folder a path or URI needs, and the numbered checkpoints in one."""

from __future__ import annotations

import os
from pathlib import Path

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.folders.folder import Folder
from accel_ckpt.folders.local import LocalFolder
from accel_ckpt.locations import RemotePath, location

__all__ = ["checkpoints_from", "complete_checkpoints", "find_folder", "prune_checkpoints"]


def find_folder(place: str | os.PathLike[str]) -> Folder:
    """The folder of a path or URI; the only place that tells one from the other.

    Raises:
        ValueError: the URI names no bucket, or climbs with ``..``.
    """
    path = location(place)
    if isinstance(path, RemotePath):
        from accel_ckpt.folders.objects.folder import ObjectFolder  # nothing else needs fsspec

        return ObjectFolder(path)
    return LocalFolder(path)


def complete_checkpoints(base: str | os.PathLike[str], prefix: str = "checkpoint_") -> list[Path]:
    """The complete checkpoints ``<prefix><number>`` of a folder, oldest first.

    The order is that of the numbers; times do not matter. Complete means: a readable manifest, and every file
    that it lists with its size. Folders that are not complete are left out.
    """
    return find_folder(base).complete_checkpoints(prefix)


def checkpoints_from(base: str | os.PathLike[str], number: int, prefix: str = "checkpoint_") -> list[Path]:
    """Whatever is called ``<prefix><n>`` with n of at least ``number``, complete or not, in rising order.

    A new checkpoint ``number`` beside one of these would be taken for the older one: pruned first, never the newest.
    """
    return find_folder(base).checkpoints_from(number, prefix)


def prune_checkpoints(
    base: str | os.PathLike[str], keep: int, prefix: str = "checkpoint_", *, disk: Disk = LOCAL
) -> list[Path]:
    """Remove the oldest complete checkpoints until ``keep`` are left. Call it on one rank, after a commit.

    A checkpoint half removed is never taken for one. What cannot be removed is a warning that names it; it stays, and
    the next call, or the next save, tries again.

    Returns:
        What was removed.

    Raises:
        ValueError: ``keep`` is less than one.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    return find_folder(base).prune_checkpoints(keep, prefix, disk)
