"""Files that readers see whole: the old content or the new one, and never a part."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a text, in UTF-8 and with its line ends as they are.

    Raises:
        OSError: it cannot be written; a file that is there is not changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
