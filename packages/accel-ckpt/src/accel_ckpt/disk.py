"""The calls through which a checkpoint reaches the disk.

They are methods of one small class so that tests can make each of them fail in turn; nothing else in this
package writes, renames or removes files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    _fcntl = None  # type: ignore[assignment]
fcntl: ModuleType | Any = _fcntl

__all__ = ["LOCAL", "Disk"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk:
    """The local file system."""

    def open_new(self, path: Path) -> int:
        """Create a file that must not exist and open it for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def set_direct(self, descriptor: int, direct: bool) -> bool:
        """Ask for writes past the page cache, or take that back; returns whether they now go past it."""
        if fcntl is None or not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return direct

    def reserve(self, descriptor: int, size: int) -> None:
        """Reserve `size` bytes of the disk for a file, where the platform and the file system can."""
        if not hasattr(os, "posix_fallocate"):  # macOS, Windows
            return
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data`` and return how many bytes were taken."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Return when what was written is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file that was opened by :meth:`open_new`; what was not synced may be lost."""
        os.close(descriptor)

    def mkdir(self, path: Path) -> None:
        """Create a directory that must not exist."""
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file that is there."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and what is in it; of a link to one, as of a checkpoint moved elsewhere, the link."""
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def exchange(self, first: Path, second: Path) -> bool:
        """Let two directories swap names in one step; false where the platform or file system cannot."""
        call = _renameat2()
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        raise OSError(code, os.strerror(code), str(first), None, str(second))

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk; Windows has no such call."""
        if os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


LOCAL = Disk()


def hidden_sibling(path: Path, kind: str) -> Path:
    """A new name beside ``path`` that no reader of checkpoints takes for one."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(6)}")


@cache
def _renameat2() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
