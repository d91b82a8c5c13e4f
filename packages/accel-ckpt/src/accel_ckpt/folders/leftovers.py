"""Temporary folders of saves: locked while their save lives, found and removed when it died."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from accel_ckpt.disk import LOCAL, Disk, fcntl
from accel_state.messages import warn

__all__ = [
    "TemporaryFolder",
    "abandoned",
    "clean_leftovers",
    "host_token",
    "is_abandoned",
    "locked",
    "previous_name",
    "remove_or_warn",
    "restore_interrupted_swaps",
    "temporary_name",
    "unfinished",
]

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(.+)\.(saving|previous)-([0-9a-f]{12}@.+)")
# Seconds; a lock of another machine cannot be seen, so its folder is judged by its age.
_FOREIGN_AGE = 24 * 3600


# Seconds to wait for another save that is just removing a folder which it found before its owner had locked it.
_CLEANING = 30.0


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname()) or "host"


def temporary_name(directory: Path, token: str) -> Path:
    """The temporary folder of a save of ``directory``; every rank that knows the token can compute it."""
    return directory.with_name(f".{directory.name}.saving-{token}")


def previous_name(directory: Path, token: str) -> Path:
    """The name of the old folder during a swap in two steps."""
    return directory.with_name(f".{directory.name}.previous-{token}")


class TemporaryFolder:
    """A new folder that is locked for as long as this object, and so this process, lives.

    The lock is on the folder itself and follows it through a rename.
    """

    def __init__(self, path: Path, disk: Disk = LOCAL) -> None:
        self.path = path
        self._descriptor: int | None = None
        while True:
            disk.mkdir(path)
            if fcntl is None:
                return
            with contextlib.suppress(FileNotFoundError):  # another save cleaned it before it was locked
                self._descriptor = _lock(path, time.monotonic() + _CLEANING)
                return

    def release(self) -> None:
        """Give up the lock; the folder stays."""
        if self._descriptor is not None:
            _unlock(self._descriptor)
            self._descriptor = None


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free, and is ours now; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.info("folders of this file system cannot be locked: %s", error)
        return None
    return True


def _unlock(descriptor: int) -> None:
    # Closing is not enough: processes forked meanwhile, such as a loader's workers, have the lock in common with us.
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def host_token(random: str) -> str:
    """The token of a save: a random part and the machine that coordinates it."""
    return f"{random}@{_host()}"


def clean_leftovers(parent: Path, now: float, disk: Disk = LOCAL) -> list[Path]:
    """Remove the temporary folders of dead saves from a folder of checkpoints, with a warning that names each.

    A folder whose save is alive stays; if it was created but not yet locked, its save creates it again. Whether a save
    of another machine is alive cannot be known; its folder stays for a day.

    Args:
        parent: the folder that holds the checkpoints.
        now: the file system's own time, in seconds since the epoch.
        disk: the file system.

    Returns:
        The removed folders. Others that cannot be removed stay, with a warning, until a later save removes them.
    """
    removed = []
    for path in abandoned(parent, now):
        holds_something = not _is_empty(path)
        if not remove_or_warn(path, disk):
            continue
        # An empty one may be a living save's, made this moment and not yet locked.
        if holds_something:
            warn(f"a save that did not finish left {path}; it is removed")
        removed.append(path)
    return removed


def abandoned(parent: Path, now: float) -> Iterator[Path]:
    """The temporary folders of dead saves, as for `clean_leftovers`, each locked until the next one is asked for."""
    for path, name, kind, token in _leftovers(parent):
        if kind == "previous" and not (parent / name).exists():
            continue
        with _claimed(path, token, now) as dead:
            if dead:
                yield path


def unfinished(parent: Path) -> dict[str, bool]:
    """The names of all temporary folders, and whether the save of each is known to be dead."""
    dead = {path.name for path in abandoned(parent, time.time())}
    return {path.name: path.name in dead for path, *_ in _leftovers(parent)}


def remove_or_warn(path: Path, disk: Disk = LOCAL) -> bool:
    """Remove a folder that is no longer needed. If that fails, a warning names it, and later saves try again.

    A save does not fail because of older files, such as a file of another user, or one that is open on NFS.

    Returns:
        Whether the folder was removed.
    """
    try:
        disk.remove_tree(path)
    except FileNotFoundError:  # another machine is removing it, too
        return True
    except OSError as error:
        # From one place and with one text for each folder, so that Python says it once.
        warn(
            f"{path} is no longer needed and could not be removed: {error}. Every save tries again; the checkpoints "
            "beside it are complete",
            once=True,
        )
        return False
    return True


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:  # gone, or of another user: then removing it tells
        return False


def _leftovers(parent: Path) -> list[tuple[Path, str, str, str]]:
    # By name first: the folder may hold thousands of other things, and every save looks.
    found = [match for name in sorted(os.listdir(parent)) if (match := _TEMPORARY.fullmatch(name))]
    return [
        (parent / match[0], match[1], match[2], match[3]) for match in found if (parent / match[0]).is_dir()
    ]


@contextlib.contextmanager
def _claimed(path: Path, token: str, now: float) -> Iterator[bool]:
    """Whether the save that a folder belongs to is dead; if so, the folder is locked inside the block."""
    if fcntl is None or token.rpartition("@")[2] != _host():
        try:
            age = now - path.stat().st_mtime
        except FileNotFoundError:
            age = 0.0
        yield age >= _FOREIGN_AGE
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:  # its own save has just finished, or it is another user's
        logger.info("whether the save of %s is alive is not known: %s", path, error)
        yield False
        return
    try:
        # The save may have finished, and released its lock, between the two calls above and below.
        yield bool(_try_lock(descriptor)) and _is(path, descriptor)
    finally:
        _unlock(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether no process on this machine holds the lock of a folder; False if locks are not supported."""
    if fcntl is None:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return bool(_try_lock(descriptor))
    finally:
        _unlock(descriptor)


@contextlib.contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of an existing folder, so that others see its save as alive.

    Args:
        directory: the folder. The lock stays with it when it is renamed.
        patience: seconds to wait for another save that holds it; after that, continue without it.
    """
    if fcntl is None:
        yield
        return
    descriptor = _lock(directory, time.monotonic() + patience)
    try:
        yield
    finally:
        _unlock(descriptor)


def _lock(directory: Path, until: float) -> int:
    while True:
        descriptor = os.open(directory, os.O_RDONLY)
        held = _try_lock(descriptor)
        if held is None or (held and _is(directory, descriptor)) or time.monotonic() >= until:
            return descriptor
        _unlock(descriptor)  # another save holds it, or has put another folder in its place
        time.sleep(0.005)


def _is(directory: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(directory), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def restore_interrupted_swaps(parent: Path, disk: Disk = LOCAL) -> None:
    """Restore the names of old checkpoints after a swap in two steps was interrupted between the steps."""
    if not parent.is_dir():
        return
    for path, name, kind, token in _leftovers(parent):
        target = parent / name
        if kind != "previous" or target.exists():
            continue
        with _claimed(path, token, float("inf")) as dead:
            if dead and not target.exists():
                _put_back(path, target, disk)


def _put_back(path: Path, target: Path, disk: Disk) -> None:
    try:
        disk.rename(path, target)
    except FileNotFoundError:  # another rank was faster
        return
    except OSError as error:  # a file system that is read only, or a folder of another user
        warn(
            f"a save was interrupted while it replaced {target}, and the previous one could not be put back: {error}. "
            f"It is complete in {path}",
            once=True,
        )
        return
    warn(f"a save was interrupted while it replaced {target}; the previous one is put back")
