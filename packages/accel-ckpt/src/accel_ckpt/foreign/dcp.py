"""Folders of torch's Distributed Checkpoint, read without a process group and without its pickles.

Such a folder has a ``.metadata`` file, a pickle that says which piece of which tensor is where, and files
``__<rank>_<n>.distcp`` in which every piece, and every plain value, is a small file of ``torch.save`` of its
own. torch's reader unpickles both without limits. Here the metadata may name only a few classes, which are replaced by
stand-ins, and values are read with ``weights_only=True``.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from accel_ckpt.foreign.pickles import FileSlice, read_plain, unpickle
from accel_ckpt.foreign.pieces import Piece, PiecedTensor
from accel_ckpt.format.forms import OTHERS, check_form
from accel_ckpt.format.index import inside
from accel_state.errors import NotAvailableError

__all__ = ["DCP_METADATA", "DcpFolder", "is_dcp_folder"]

DCP_METADATA = ".metadata"


def is_dcp_folder(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of torch."""
    return (folder / DCP_METADATA).is_file()


class _Record:
    """Stands in for a class of the metadata: keeps what the pickle gives it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state


class _Metadata(_Record):
    state_dict_metadata: Any = None
    storage_data: Any = None
    planner_data: Any = None


class _Tensor(_Record):
    pass


_CLASSES: dict[str, type[_Record]] = {
    "Metadata": _Metadata,
    "TensorStorageMetadata": _Tensor,
    **dict.fromkeys(("BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"), _Record),
    **dict.fromkeys(("MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING"), _Record),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        ("pathlib", name): _Record
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def _stand_in(module: str, name: str) -> Any:
    if module.startswith("torch.distributed.") and name in _CLASSES:
        return _CLASSES[name]
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    return _PLAIN.get((module.replace("pathlib._local", "pathlib"), name))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an item's bytes are."""

    file: Path
    start: int
    length: int


class DcpFolder:
    """A distributed checkpoint: tensors, plain values, and the nested keys of both.

    Args:
        folder: with a ``.metadata`` file.

    Raises:
        CheckpointNotFoundError: there is no such folder or no metadata in it.
        CorruptCheckpointError: the metadata is damaged, or files are missing or shorter than it says.
        UnsafeCheckpointError: the metadata names other classes than such a file has, or files outside.
        NotAvailableError: its files are compressed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[Path, int] = {}
        path = folder / DCP_METADATA
        if not path.is_file():
            raise CheckpointNotFoundError(
                f"{folder} holds no {DCP_METADATA} file, so it is no distributed checkpoint of torch, or its "
                "save did not finish"
            )
        metadata = read_plain(path, _stand_in)
        try:
            self._parse(metadata)
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{path} does not describe a distributed checkpoint: {error!r}"
            ) from error

    def _parse(self, metadata: Any) -> None:
        if not isinstance(metadata, _Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        places = {
            (index.fqn, _corner(getattr(index, "offset", None))): self._place(info)
            for index, info in metadata.storage_data.items()
        }
        self.tensors: dict[str, PiecedTensor] = {}
        self._values: dict[str, _Place] = {}
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, _Tensor):
                self.tensors[name] = self._tensor(name, about, places)
            else:
                self._values[name] = places[name, None]
                self._check_place(name, places[name, None])
        keys = metadata.planner_data or {}
        self.keys: dict[str, tuple[str | int, ...]] = {
            name: tuple(keys.get(name, (name,))) for name in metadata.state_dict_metadata
        }
        check_form(self.keys, {OTHERS: [(str, int)]}, str(self.folder / DCP_METADATA))
        check_form([*self.keys], [str], str(self.folder / DCP_METADATA))

    def _place(self, info: Any) -> _Place:
        if getattr(info, "transform_descriptors", None):
            raise NotAvailableError(
                f"{self.folder} is compressed ({', '.join(info.transform_descriptors)}), which is not read here; "
                "load it with torch.distributed.checkpoint and save it without extensions"
            )
        path = inside(self.folder, info.relative_path)
        return _Place(path, int(info.offset), int(info.length))

    def _tensor(self, name: str, about: Any, places: Mapping[Any, _Place]) -> PiecedTensor:
        dtype = about.properties.arguments[0]
        pieces = []
        for chunk in about.chunks:
            place = places[name, _corner(chunk.offsets)]
            self._check_place(name, place)
            pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), partial(_read_tensor, place, name)))
        return PiecedTensor(name, about.size, dtype, pieces, str(self.folder))

    def _check_place(self, name: str, place: _Place) -> None:
        if place.file not in self._sizes:
            self._sizes[place.file] = place.file.stat().st_size if place.file.is_file() else -1
        end = place.start + place.length
        if not (0 <= place.start <= end <= self._sizes[place.file]):
            raise CorruptCheckpointError(
                f"{place.file} is missing or too short: {self.folder / DCP_METADATA} says that a part of {name!r} "
                f"is in its bytes {place.start} to {end}"
            )

    def value(self, name: str) -> Any:
        """A plain value."""
        place = self._values[name]
        with open(place.file, "rb", buffering=0) as file:
            raw = FileSlice(file, place.start, place.length).read()
        return unpickle(io.BytesIO(raw), f"the value {name!r} in {place.file}")

    def top_keys(self) -> list[str]:
        """The keys that the saved dictionary had at its top."""
        return list(dict.fromkeys(str(key[0]) for key in self.keys.values()))

    def below(self, top: str) -> dict[str, tuple[str | int, ...]]:
        """Names of the items under a top key, with the rest of their keys."""
        return {name: key[1:] for name, key in self.keys.items() if key[0] == top and len(key) > 1}

    def tree(self, top: str) -> Any:
        """The nested dictionaries and lists under a top key, read whole."""
        root: dict[Any, Any] = {}
        for name, key in self.below(top).items():
            node = root
            for step in key[:-1]:
                node = node.setdefault(step, {})
            node[key[-1]] = self.tensors[name].whole() if name in self.tensors else self.value(name)
        return _lists(root)


def _corner(offset: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


def _read_tensor(place: _Place, name: str) -> torch.Tensor:
    with open(place.file, "rb", buffering=0) as file:
        part = io.BufferedReader(FileSlice(file, place.start, place.length), 1 << 20)
        value = unpickle(part, f"the tensor {name!r} in {place.file}")
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpointError(
            f"{place.file} holds a {type(value).__name__} where the tensor {name!r} belongs"
        )
    return value.contiguous()


def _lists(node: Any) -> Any:
    """Lists where keys are the numbers from 0 on, as lists are flattened."""
    if not isinstance(node, dict):
        return node
    inner = {key: _lists(value) for key, value in node.items()}
    if inner and set(inner) == set(range(len(inner))) and all(type(key) is int for key in inner):
        return [inner[index] for index in range(len(inner))]
    return inner
