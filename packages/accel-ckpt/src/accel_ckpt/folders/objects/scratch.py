"""Folders of this machine for what comes from object storage or goes there; removed with their owner, or after it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from accel_ckpt.disk import Disk
from accel_ckpt.folders.leftovers import TemporaryFolder, host_token, is_abandoned

__all__ = ["Scratch"]

logger = logging.getLogger(__name__)

_PREFIX = "accel-checkpoint-"
_NAME = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{12}@.+")


class _Private(Disk):
    """Makes folders that other users cannot read."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o700)


class Scratch:
    """An empty folder where ``tempfile`` makes them (``TMPDIR``), for as long as this object lives.

    Those that killed processes of this user left are removed first.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        _clean(base)
        self.folder = base / f"{_PREFIX}{host_token(secrets.token_hex(6))}"
        held = TemporaryFolder(self.folder, _Private())
        self.remove = weakref.finalize(self, _remove, self.folder, held, os.getpid())
        """Remove the folder now; also called when this object is garbage."""


def _remove(folder: Path, held: TemporaryFolder, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has the object, too
        shutil.rmtree(folder, ignore_errors=True)
        held.release()


def _clean(base: Path) -> None:
    for path in base.iterdir():
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            if path.lstat().st_uid == os.getuid() and is_abandoned(path):
                logger.info("a process that was killed left %s; it is removed", path)
                shutil.rmtree(path, ignore_errors=True)
