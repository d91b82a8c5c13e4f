"""The scratch folder of a proof: the script reads the files of the current folder, and writes beside them.

The scratch folder has the folders of the current one and links to its files. Before a link is opened for writing, a
copy takes its place. What the script writes elsewhere, by an absolute path, is its own affair, unless it would
overwrite or remove a file that is older than the proof.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["enter", "shadow"]

# Files that have links of their own; further folders are links as a whole.
_MOST = 10_000
_WRITING = os.O_WRONLY | os.O_RDWR


def shadow(folder: Path, place: Path) -> Path:
    """Make a scratch folder for a folder, inside of one for its parent, so that relative paths lead to what they did.

    Args:
        folder: the current one.
        place: does not exist yet.

    Returns:
        What stands for `folder`.
    """
    folder = folder.resolve()
    own = place / (folder.name or "root")
    own.mkdir(parents=True)
    if folder.parent != folder and os.access(folder.parent, os.R_OK):
        for entry in folder.parent.iterdir():
            if entry != folder and not place.is_relative_to(entry):
                (place / entry.name).symlink_to(entry)
    waiting, files = [(folder, own)], 0
    while waiting:
        real, copy = waiting.pop(0)
        for entry in sorted(real.iterdir()):
            if place.is_relative_to(entry):
                continue
            whole = entry.is_symlink() or entry.name.startswith(".") or files > _MOST
            if entry.is_dir() and not whole and os.access(entry, os.R_OK | os.X_OK):
                (copy / entry.name).mkdir()
                waiting.append((entry, copy / entry.name))
            else:
                (copy / entry.name).symlink_to(entry)
                files += 1
    return own


def enter(folder: Path, since: float, overwrites: bool) -> None:
    """Make a scratch folder the current one of this process, for the rest of its life.

    Args:
        folder: from `shadow`.
        since: time of the proof's start.
        overwrites: whether older files elsewhere may be overwritten and removed.
    """
    os.chdir(folder)
    scratch, *caches = (
        os.path.join(os.path.realpath(place), "")
        for place in (folder.parent, tempfile.gettempdir(), os.path.expanduser("~/.cache"), "/dev", "/proc")
    )

    def overwritten(path: Any, *, follows: bool) -> None:
        path = os.fsdecode(path)
        here = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        if follows and here.startswith(scratch) and os.path.islink(here):
            original = os.path.realpath(here)
            os.unlink(here)
            if os.path.isfile(original):
                shutil.copyfile(original, here)
        real = os.path.realpath(here) if follows else here
        known = real.startswith((scratch, *caches)) or "__pycache__" in real
        if overwrites or known or not os.path.exists(real) or os.path.getmtime(real) >= since:
            return
        sys.stderr.write(f"OverwriteError: the script overwrites {real}; pass --overwrite to allow it\n")
        sys.stderr.flush()
        os._exit(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
            if writes and not isinstance(path, int):
                overwritten(path, follows=True)
        elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
            overwritten(arguments[0], follows=False)
        elif event == "os.rename":
            overwritten(arguments[1], follows=False)

    sys.addaudithook(watch)
    _announce_writers()


def _announce_writers() -> None:
    """Raise the event of an opened file for functions that open one without Python."""
    import safetensors.torch
    import torch

    def announced(write: Callable[..., Any], position: int) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, str | os.PathLike):
                sys.audit("open", os.fspath(path), "wb", os.O_TRUNC)
            return write(*args, **kwargs)

        return save

    torch.save = announced(torch.save, 1)
    safetensors.torch.save_file = announced(safetensors.torch.save_file, 1)
