"""Reading checkpoint files: headers first; every value from a file is checked before it is used."""

from __future__ import annotations

import json
import math
import pickle
import re
import stat
import struct
import zipfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch
import xxhash

from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_ckpt.format.memory import MappedFile, pread_into
from accel_ckpt.format.model_entries import model_entries, nested_keys
from accel_ckpt.format.pickled_data import plain_data
from accel_ckpt.modules.versions import versions_of, with_versions
from accel_ckpt.tensor_storage import (
    DTYPES,
    METADATA_KEYS,
    VERSIONS_KEY,
    as_bytes,
    id_tensor_storage,
    same_tensor_id,
    why_not_plain,
)
from accel_state.messages import first_line

__all__ = [
    "DAMAGE",
    "Header",
    "MappedShard",
    "TensorEntry",
    "cause_of",
    "is_expanded",
    "is_plain_zip",
    "parse_json",
    "read_entry",
    "read_header",
    "read_into",
    "read_json",
    "read_pickled",
    "read_pickled_weights",
    "read_text",
    "refuse_expanded",
    "refuse_irregular",
    "refuse_pointer",
]

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")  # dtypes of the format whose shapes torch counts otherwise
_CHUNK = 1 << 19  # bytes that are read ahead; they are in the processor's cache when they are hashed
_MAX_DIMENSIONS = 1000  # far above any use, and few enough to multiply

# What torch.load raises for bytes that torch.save did not write, besides UnpicklingError.
DAMAGE = (
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    AssertionError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
)

_POINTER = b"version https://git-lfs"

# Parts of a file that are read at a time: a disk is faster with a few requests, and reading with a second core.
_READERS = 2


class TensorEntry(NamedTuple):
    """The location of a tensor: its file and the offset of its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file, checked against the size of the file."""

    file: Path
    size: int
    entries: Mapping[str, TensorEntry]
    """Entries by name, in the order of their bytes in the file."""
    metadata: Mapping[str, str]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied names that were left out of the file, mapped to the name in the file.

        They are kept as safetensors' own ``save_model`` keeps them: as metadata ``alias: name``.
        """
        return {
            alias: name
            for alias, name in self.metadata.items()
            if name in self.entries and alias not in self.entries and alias not in METADATA_KEYS
        }

    @property
    def versions(self) -> dict[str, int]:
        """Name of a module → the version in which it saved its state dict, if the file has it.

        Raises:
            CorruptCheckpointError: the metadata are not such a mapping.
        """
        if VERSIONS_KEY not in self.metadata:
            return {}
        what = f"{VERSIONS_KEY} in the header of {self.file}"
        found: dict[str, int] = parse_json(self.metadata[VERSIONS_KEY].encode("utf-8", "surrogatepass"), what)
        check_form(found, {OTHERS: natural}, what)
        return found


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is truncated, or its header does not describe it.
        UnsupportedValueError: several values of a tensor share a byte.
    """
    refuse_irregular(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                refuse_pointer(path)
                raise CorruptCheckpointError(
                    f"{path} has {size} bytes, but announces a header of {length}; it is truncated or no "
                    "safetensors file"
                )
            raw = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    return _parse_header(path, size, 8 + length, raw)


def _parse_header(path: Path, size: int, start: int, raw: bytes) -> Header:
    fields = parse_json(raw, f"the header of {path}")
    if not isinstance(fields, dict):
        raise CorruptCheckpointError(f"the header of {path} is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise CorruptCheckpointError(f"the metadata of {path} does not map strings to strings")
    entries = [_parse_entry(path, name, field, start) for name, field in fields.items()]
    entries.sort(key=attrgetter("offset", "nbytes"))
    position = start
    for entry in entries:
        if entry.offset != position:
            raise CorruptCheckpointError(
                f"in {path} the tensor {entry.name!r} starts at byte {entry.offset}, where {position} was "
                "expected: tensors overlap or leave a hole"
            )
        position += entry.nbytes
    if position != size:
        raise CorruptCheckpointError(
            f"{path} has {size} bytes, but its header describes {position}; it is truncated or changed"
        )
    return Header(path, size, MappingProxyType({e.name: e for e in entries}), MappingProxyType(metadata))


def _parse_entry(path: Path, name: str, field: Any, start: int) -> TensorEntry:
    try:
        dtype = DTYPES[field["dtype"]]
        shape = tuple(field["shape"])
        begin, end = field["data_offsets"]
        for number in (*shape, begin, end):
            if type(number) is not int or number < 0:
                raise ValueError("a size or an offset is not a natural number")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(field, dict) and field.get("dtype") in _PACKED:
            raise UnsupportedValueError(
                f"{path} cannot be loaded: the tensor {name!r} is {field['dtype']}, of which several values share a "
                f"byte; only {', '.join(DTYPES)} are read here. Save its bytes, as U8"
            ) from None
        raise CorruptCheckpointError(
            f"{path} describes the tensor {name[:200]!r} by {repr(field)[:200]}, which cannot be read: {error!r}"
        ) from error
    if not _takes(shape, dtype, end - begin):
        raise CorruptCheckpointError(
            f"{path} gives {end - begin} bytes to the tensor {name!r}, which is not what a tensor of shape "
            f"{str(list(shape))[:200]} and {dtype} takes"
        )
    return TensorEntry(name, dtype, shape, path, start + begin, end - begin)


def _takes(shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> bool:
    """Whether a tensor has this size; a product of absurd sizes is never computed to its end."""
    if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) >= 1 << 63:
        return False
    if 0 in shape:
        return nbytes == 0 and math.prod(size for size in shape if size) < 1 << 63
    return math.prod(shape) * dtype.itemsize == nbytes


class MappedShard:
    """A safetensors file mapped into memory, privately: writing to its tensors never reaches the file.

    Args:
        path: the file.
        xxh3: the required checksum of the content; ``None`` does not check.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is truncated, its header does not describe it, or its checksum differs.
    """

    def __init__(self, path: Path, xxh3: str | None = None) -> None:
        self.header = read_header(path)
        self._file: MappedFile | None = None
        if xxh3 is not None:
            self.verify(xxh3)

    def verify(self, xxh3: str) -> None:
        """Compare the content with a checksum.

        Raises:
            CorruptCheckpointError: the checksum differs.
        """
        check_digest(self.header.file, file_digest(self.header.file), xxh3)

    def again(self) -> MappedShard:
        """Map the file once more: writing to tensors of one mapping does not change those of the other."""
        other = copy(self)
        other._file = None
        return other

    def is_view(self, name: str) -> bool:
        """Whether a tensor is aligned in the file, so that it can be used in place."""
        entry = self.header.entries[name]
        return entry.offset % entry.dtype.itemsize == 0

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU: a view of the mapping, or a copy if it is not aligned in the file.

        Its storage has only its own bytes, so saving or copying the storage does not include the rest of the file.
        """
        entry = self.header.entries[name]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        size = entry.dtype.itemsize
        if entry.offset % size:
            loose = torch.frombuffer(self._map(), dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
            return loose.clone().view(entry.dtype).view(entry.shape)
        count = entry.nbytes // size
        found = torch.frombuffer(self._map(), dtype=entry.dtype, count=count, offset=entry.offset)
        return found if len(entry.shape) == 1 else found.view(entry.shape)

    def _map(self) -> MappedFile:
        if self._file is None:
            try:
                self._file = MappedFile(self.header.file, self.header.size)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"{self.header.file} has become shorter; another process is changing it"
                ) from error
        return self._file


def read_entry(entry: TensorEntry, into: torch.Tensor | None = None) -> torch.Tensor:
    """Read one tensor of a safetensors file.

    Args:
        entry: the location of the tensor.
        into: contiguous memory on the CPU, of its shape and dtype; by default new memory.

    Raises:
        CorruptCheckpointError: the file has become shorter.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu") if into is None else into
    if entry.nbytes:
        with open(entry.file, "rb", buffering=0) as file:
            read_into(file, as_bytes(tensor), entry.file, entry.offset)
    return tensor


def read_into(file: IO[bytes], view: memoryview, path: Path, offset: int) -> None:
    """Fill memory with the bytes of an unbuffered file from an offset on; several threads may read one file.

    Raises:
        CorruptCheckpointError: the file ends too early.
    """
    filled = 0
    while filled < len(view):
        count = pread_into(file.fileno(), view[filled:], offset + filled)
        if not count:
            raise CorruptCheckpointError(f"{path} ended while it was read; another process is changing it")
        filled += count


def check_digest(path: Path, found: str, expected: str | None) -> None:
    """Compare a checksum with the one in the manifest."""
    if expected is not None and found != expected:
        raise CorruptCheckpointError(
            f"{path} has the checksum {found}, but the manifest says {expected}: the file has changed since "
            "it was saved; load another checkpoint"
        )


def file_digest(path: Path) -> str:
    """The xxh3 checksum of a file. It is read, not mapped: touching what is no longer in the file ends the process.

    Raises:
        CorruptCheckpointError: the file has become shorter.
    """
    size = path.stat().st_size
    window = [memoryview(bytearray(min(_CHUNK, size))) for _ in range(2 * _READERS)]
    digest = xxhash.xxh3_64()
    pending: deque[Future[memoryview]] = deque()
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as readers:

        def read(number: int) -> memoryview:
            view = window[number % len(window)][: size - number * _CHUNK]
            read_into(file, view, path, number * _CHUNK)
            return view

        for number in range(-(-size // _CHUNK)):
            if len(pending) == len(window):  # what comes next is read to the place of the first
                digest.update(pending.popleft().result())
            pending.append(readers.submit(read, number))
        for future in pending:
            digest.update(future.result())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path), str(path))


def read_text(path: Path, xxh3: str | None = None) -> bytes:
    """Read a small file, checking its checksum if one is given."""
    refuse_irregular(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    if xxh3 is not None:
        check_digest(path, xxhash.xxh3_64_hexdigest(raw), xxh3)
    return raw


def parse_json(raw: bytes, what: str) -> Any:
    """Parse JSON, and refuse objects that have a key twice: one of the values would be lost silently.

    Raises:
        CorruptCheckpointError: the JSON is invalid, has a duplicate key, or is nested too deeply.
    """
    try:
        return json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not JSON as it should be: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs more than once in one object")
    return found


def refuse_irregular(path: Path) -> None:
    """Refuse pipes and devices, which would be read without an end, and directories.

    Raises:
        CorruptCheckpointError: the path exists and is not a regular file.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it says why
        return
    if not stat.S_ISREG(mode):
        raise CorruptCheckpointError(f"{path} is not a regular file, so nothing was read from it")


def refuse_pointer(path: Path) -> None:
    """Refuse the Git LFS pointer in place of a file in a clone made without Git LFS.

    Raises:
        CorruptCheckpointError: the file is a pointer; says how to get the real file.
    """
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CorruptCheckpointError(
                f"{path} is only a pointer of Git LFS to the file; fetch the file: git lfs install && git lfs pull"
            )


def read_pickled(path: Path, *, mapped: bool = True) -> Any:
    """Read a file of ``torch.save`` to the CPU without running code from it.

    Args:
        path: the file.
        mapped: map the tensors privately instead of reading them, where the file's layout allows.

    Raises:
        UnsafeCheckpointError: reading the file would call a function that is not a tensor constructor.
        CorruptCheckpointError: the file is not of ``torch.save``, or is truncated.
    """
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    refuse_pointer(path)
    mapped = is_plain_zip(path) and mapped
    try:
        return plain_data(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} was not read, because doing so would run code from it, or because it is damaged: "
            f"{cause_of(error)}"
        ) from error
    except DAMAGE as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read; it is truncated or changed: {cause_of(error)}"
        ) from error


EXTRA_STATE = "_extra_state"
"""torch's name for the result of a module's ``get_extra_state`` in a state dict."""


def read_pickled_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file of ``torch.save`` by name, and nothing else; see `read_pickled_model`.

    Raises:
        UnsupportedValueError: the file holds extra state that is not a tensor.
    """
    tensors, objects = read_pickled_model(path)
    for name, value in objects.items():
        raise UnsupportedValueError(
            f"{path} holds extra state of a module that is not a tensor, so it cannot be read as weights: {name!r} is "
            f"a {type(value).__qualname__}. load_checkpoint_in_model and model.load_state_dict load the file as it is"
        )
    return tensors


def read_pickled_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors of a file of ``torch.save`` by name, mapped if possible, and extra state that is not a tensor.

    The result has the versions of modules, as in a state dict of torch.

    Tensors that are not expanded are contiguous, and do not share memory unless two names hold the same tensor:
    training one of two overlapping views would change the other.

    Raises:
        CorruptCheckpointError: the file does not hold tensors by name.
        UnsupportedValueError: a tensor is not plain values in memory.
    """
    content = read_pickled(path)
    if not isinstance(content, Mapping):
        raise CorruptCheckpointError(
            f"{path} does not hold a dictionary of tensors by name, but one {type(content).__qualname__}"
        )
    content = _model_in(content, path)
    versions = versions_of(content)
    objects = {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and is_extra_state(name) and not isinstance(value, torch.Tensor)
    }
    content = {name: value for name, value in content.items() if name not in objects} if objects else content
    for name, value in content.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            raise CorruptCheckpointError(
                f"{path} does not hold a dictionary of tensors by name: under {name!r} is one "
                f"{type(value).__qualname__}. Save the tensors alone, as torch.save(model.state_dict(), path) does"
            )
    same: dict[Any, torch.Tensor] = {}
    used = set()
    for name, tensor in content.items():
        if (reason := why_not_plain(tensor)) is not None:
            raise UnsupportedValueError(f"{path} cannot be loaded: the tensor {name!r} {reason}")
        storage = id_tensor_storage(tensor)
        if is_expanded(tensor):  # its values are made when its shape was compared
            same[same_tensor_id(tensor)] = tensor.detach()
        elif same_tensor_id(tensor) not in same:
            plain = tensor.detach().resolve_conj().resolve_neg()
            apart = plain.is_contiguous() and storage not in used
            same[same_tensor_id(tensor)] = (
                plain if apart else plain.clone(memory_format=torch.contiguous_format)
            )
        used.add(storage)
    found = {name: same[same_tensor_id(tensor)] for name, tensor in content.items()}
    return with_versions(found, versions), objects


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows values several times, so that a small file can ask for any amount of memory."""
    return tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes()


def refuse_expanded(name: str, tensor: torch.Tensor, where: str) -> None:
    """Refuse an expanded tensor where nothing says how large it should be.

    Raises:
        CorruptCheckpointError: it is one.
    """
    if is_expanded(tensor):
        raise CorruptCheckpointError(
            f"{where} holds {tensor.untyped_storage().nbytes():,} bytes of {name!r}, which shows them as "
            f"{tensor.nbytes:,}; it was not saved as a whole. Save tensor.contiguous()"
        )


def _model_in(content: Mapping[Any, Any], path: Path) -> Mapping[Any, Any]:
    """The state dict of the model in what a program saved."""
    if not any(
        isinstance(value, Mapping) and not is_extra_state(str(name)) for name, value in content.items()
    ):
        return content
    found = nested_keys(content)
    entries = model_entries({key: isinstance(value, torch.Tensor) for key, value in found.items()}, path)
    holder: Any = content
    for step in next(iter(entries), ())[:-1]:
        holder = holder[step]
    return with_versions({name: found[key] for key, name in entries.items()}, versions_of(holder))


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def is_plain_zip(path: Path) -> bool:
    """Whether a file is a zip archive as ``torch.save`` writes it: no member is compressed or overlaps another.

    torch would map the bytes of a compressed tensor as if they were its values, and a small file could unpack to
    more than fits into memory.

    Raises:
        CorruptCheckpointError: it is another zip archive.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read; it is truncated or changed: {error}") from error
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    twice = len({member.filename for member in members}) < len(members)
    if packed or twice or sum(member.file_size for member in members) > path.stat().st_size:
        raise CorruptCheckpointError(
            f"{path} is a zip archive that torch.save did not write: its members are compressed or overlap. Unpack it "
            "and save its content with torch.save"
        )
    return True


def cause_of(error: BaseException) -> str:
    """The cause of an error in one line; for a refused pickle the name of the object that it refers to."""
    # torch explains at length how to switch the protection off; the name of the object is what helps.
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return f"it refers to {named[1]}"
    if isinstance(error, KeyError):  # its text is the key alone
        return repr(error)
    found = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    return found[1] if found else first_line(error)
