"""Locations of checkpoints: local paths, and URIs of object storage.

Every public function calls `location` once. For a local path neither ``accel_ckpt.folders.objects`` nor fsspec is
imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accel_state.errors import NotAvailableError

__all__ = ["RemotePath", "location"]

# At least two letters, unlike the drives of Windows. A `Path` of a URI has lost one of its slashes.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_LOCAL = ("file", "local")

if TYPE_CHECKING:
    _Base = Path
else:
    _Base = type(Path())  # until Python 3.12, `Path` itself cannot have subclasses


class RemotePath(_Base):
    """A URI such as ``s3://bucket/run/checkpoint_3``, with the name and parents of a path.

    ``str()`` and ``os.fspath()`` return the URI. To open files, use the URI's file system: ``fsspec.open(str(path))``.
    """

    @property
    def scheme(self) -> str:
        """The scheme of the URI, before ``://``."""
        return self.parts[0].partition(":")[0]

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().replace(os.sep, "/").partition(":/")
        return f"{scheme}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def as_posix(self) -> str:
        """The URI."""
        return str(self)

    def expanduser(self) -> RemotePath:
        """Return the path itself: a URI has no home folder."""
        return self

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self


def _refuse(name: str) -> Any:
    def refuse(self: RemotePath, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotAvailableError(
            f"{self} is in object storage, where Path.{name}() is not available; use fsspec: "
            f"fs, path = fsspec.core.url_to_fs({str(self)!r})"
        )

    return refuse


for _name in (
    *(
        "stat",
        "lstat",
        "open",
        "exists",
        "is_dir",
        "is_file",
        "is_symlink",
        "is_mount",
        "iterdir",
        "glob",
        "rglob",
    ),
    *("mkdir", "rmdir", "unlink", "touch", "rename", "replace", "resolve", "samefile", "chmod", "symlink_to"),
    *("hardlink_to", "read_bytes", "read_text", "write_bytes", "write_text", "owner", "group", "walk"),
):
    if hasattr(Path, _name):
        setattr(RemotePath, _name, _refuse(_name))


def location(path: str | os.PathLike[str]) -> Path:
    """Turn a string or path into a local path or a `RemotePath`.

    Args:
        path: a path, in which ``~`` is the home folder; or a URI. ``file:///folder`` is the local path ``/folder``. A
            ``Path`` that was made from a URI is understood, too.

    Raises:
        ValueError: the URI names no bucket, or has ``..``.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    match = _URI.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Path(path).expanduser()
    scheme, rest = match[1].lower(), match[2].strip("/")
    if scheme in _LOCAL:
        return Path("/" + match[2].lstrip("/"))
    if not rest or ".." in rest.split("/"):
        raise ValueError(
            f"{text!r} is not a location for checkpoints; give a bucket and a name in it, without '..', as in "
            f"'{scheme}://bucket/run'"
        )
    return RemotePath(f"{scheme}:/{rest}")
