"""Files read and written as a whole: readers see the old content or the new one, never a part, and never wait long."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

__all__ = ["read_whole", "write_whole"]

_MOST = 10_000_000
_PATIENCE = 5.0


def read_whole(path: Path, most: int = _MOST) -> bytes:
    """The bytes of a file that a user names, which may be a device without an end, or a pipe that nobody writes to.

    Args:
        path: of a file; a pipe, such as that of ``<(command)``, has to end within a few seconds.
        most: the most bytes that it may have.

    Raises:
        OSError: it cannot be read, or has more bytes, or does not end.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    found = bytearray()
    try:
        waits, end = not stat.S_ISREG(os.fstat(file).st_mode), time.monotonic() + _PATIENCE
        while len(found) <= most:
            if waits and not select.select([file], (), (), max(0.0, end - time.monotonic()))[0]:
                raise OSError(
                    errno.ETIMEDOUT, f"it is no regular file, and does not end within {_PATIENCE:g} s"
                )
            piece = os.read(file, 1 << 20)
            if not piece:
                return bytes(found)
            found += piece
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which no configuration has")
    finally:
        os.close(file)


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content atomically, in UTF-8 and without changing line ends.

    Raises:
        OSError: the file cannot be written; an existing file is not changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
