"""Reading pickled files of other programs: the only module that decides which classes may be unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.format.pickled_data import TORCH_SAFE_GLOBALS, plain_data
from accel_ckpt.format.reader import DAMAGE, cause_of, is_plain_zip, refuse_pointer

__all__ = ["FileSlice", "Inert", "read_plain", "unpickle"]

# Of Python's own unpickler, besides.
_PLAIN_DAMAGE = (ImportError, MemoryError, ArithmeticError)


class FileSlice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Position in the part."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position of the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read what fits."""
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


class Inert:
    """Stands in for a class of another program: takes what a pickle gives it, and keeps nothing."""

    def __new__(cls, *arguments: Any) -> Inert:
        """An object without content."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def unpickle(
    source: Path | IO[bytes],
    what: str,
    *,
    trusted: bool = False,
    opt_in: str = "",
    mapped: bool = False,
    stand_ins: Sequence[tuple[type, str]] = (),
) -> Any:
    """Read a file of ``torch.save``, to the CPU.

    Without ``trusted`` only tensors, plain data and NumPy arrays of plain types are built, and nothing is
    called.

    Args:
        source: a file, or an open one.
        what: description of the source, for messages.
        trusted: build all objects that the file describes. That can run any code: only for files that come
            from yourself.
        opt_in: the argument by which a user allows this, for messages; empty if there is none.
        mapped: map the tensors of a file privately instead of reading them, where its layout allows.
        stand_ins: classes that take the place of those that the file names, by full name.

    Raises:
        UnsafeCheckpointError: reading the file would call a function that is not allowed.
        CorruptCheckpointError: the file is truncated, changed, or not of ``torch.save``.
    """
    if isinstance(source, Path):
        if not source.is_file():
            raise CheckpointNotFoundError(f"there is no file {source}")
        refuse_pointer(source)
        mapped = is_plain_zip(source) and mapped
    try:
        with torch.serialization.safe_globals([*TORCH_SAFE_GLOBALS, *stand_ins]):
            content = torch.load(source, map_location="cpu", weights_only=not trusted, mmap=mapped)
        return content if trusted else plain_data(content)
    except pickle.UnpicklingError as error:
        advice = f". If you trust the file: {opt_in}" if opt_in else ""
        raise UnsafeCheckpointError(
            f"{what} was not read: it holds objects that only running code from the file can build, or it is "
            f"damaged ({cause_of(error)}){advice}"
        ) from error
    except (OSError, *DAMAGE) as error:
        raise CorruptCheckpointError(
            f"{what} cannot be read; it is truncated or changed: {cause_of(error)}"
        ) from error


class _Restricted(pickle._Unpickler):
    # The one written in Python: a few bytes make the other one fill gigabytes (LONG_BINPUT with a large index).
    def __init__(self, file: IO[bytes], find: Callable[[str, str], Any]) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)


def read_plain(path: Path, find: Callable[[str, str], Any]) -> Any:
    """Unpickle a small file that is a plain pickle, with the caller's stand-ins for the classes it names.

    Args:
        path: the file.
        find: (module, name) → the stand-in; ``None`` where there is none, and then nothing is read.

    Raises:
        UnsafeCheckpointError: it names something that has no stand-in.
        CorruptCheckpointError: it is not a pickle, or truncated.
    """

    def lookup(module: str, name: str) -> Any:
        found = find(module, name)
        if found is None:
            raise UnsafeCheckpointError(
                f"{path} was not read: it refers to {module}.{name}, which has no place in such a file"
            )
        return found

    try:
        content = path.read_bytes()
        return _Restricted(io.BytesIO(content), lookup).load()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    except UnsafeCheckpointError:
        raise
    except (pickle.UnpicklingError, OSError, *DAMAGE, *_PLAIN_DAMAGE) as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read; it is truncated or changed: {cause_of(error)}"
        ) from error
