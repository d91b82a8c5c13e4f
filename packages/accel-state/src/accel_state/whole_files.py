"""Atomic replacement of files: readers see the old content or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


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
