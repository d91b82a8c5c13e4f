"""Object storage for tests: ``objects://<absolute path>`` keeps objects in files, so that several processes see them.

What object storage does not have, it has not: an object appears as a whole, there are no renames, and no folders beside
objects. `Objects.watch` is called before every request, and may raise to let it fail.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

__all__ = ["Objects", "install", "objects", "uri"]


def install() -> None:
    """Let fsspec know it."""
    fsspec.register_implementation("objects", Objects, clobber=True)


def uri(folder: Path, name: str = "bucket") -> str:
    """A URI whose objects are below a folder."""
    return f"objects:/{folder}/{name}"


def objects(folder: Path, name: str = "bucket") -> list[str]:
    """The names of the objects there."""
    root = folder / name
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


class _Collected(tempfile.SpooledTemporaryFile):
    def __init__(self, fs: Objects, path: str) -> None:
        super().__init__(max_size=1 << 30)
        self._fs, self._path = fs, path

    def close(self) -> None:
        try:
            if not self.closed:
                self.seek(0)
                self._fs.pipe_file(self._path, self.read())
        finally:
            super().close()


class Objects(AbstractFileSystem):
    """The file system."""

    protocol = "objects"
    cachable = False
    watch: ClassVar[Callable[[str, str], None] | None] = None
    """Called with the kind of the request (``put``, ``get``, ``list``, ``delete``) and the path."""
    read: ClassVar[int] = 0
    """Bytes that were read."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("objects://").strip("/")

    def _ask(self, kind: str, path: str) -> Path:
        path = self._strip_protocol(path)
        if Objects.watch is not None:
            Objects.watch(kind, path)
        return Path("/", path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        place = self._ask("put", path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=tempfile.gettempdir(), delete=False) as file:
            file.write(value)
        os.replace(file.name, place)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "wb", mode
        return _Collected(self, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        place = self._ask("get", path)
        if not place.is_file():
            raise FileNotFoundError(path)
        with open(place, "rb") as file:
            file.seek(start or 0)
            data = file.read(-1 if end is None else end - (start or 0))
        Objects.read += len(data)
        return data

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        place = Path("/", self._strip_protocol(path))
        if place.is_file():
            return {"name": str(place).strip("/"), "size": place.stat().st_size, "type": "file"}
        if place.is_dir():
            return {"name": str(place).strip("/"), "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        place = self._ask("list", path)
        if not place.exists():
            raise FileNotFoundError(path)
        children = [place] if place.is_file() else place.iterdir()
        found = [self.info(str(child)) for child in children if child.is_file() or any(child.rglob("*"))]
        return found if detail else [about["name"] for about in found]

    def rm_file(self, path: str) -> None:
        place = self._ask("delete", path)
        place.unlink()
        for parent in place.parents:
            try:
                parent.rmdir()  # there are no empty folders
            except OSError:
                break

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("object storage cannot rename")
