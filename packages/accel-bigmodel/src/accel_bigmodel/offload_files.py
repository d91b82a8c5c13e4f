"""Folders of offloaded weights as Accelerate writes them: ``<name>.dat`` per tensor, and ``index.json``.

This library does not need such folders to offload; it reads and writes them for compatibility. No code in them is run,
no file outside them is read, and their contents are mapped, not copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from accel_ckpt.format.index import inside
from accel_ckpt.format.memory import map_file
from accel_ckpt.format.reader import MappedShard, read_json, refuse_irregular
from accel_ckpt.format.writer import check_writable, json_bytes, plain_on, replace_file, write_bytes
from accel_ckpt.modules.tensors import set_module_tensor_to_device
from accel_ckpt.modules.ties import find_tied_tensors, retie_parameters
from accel_ckpt.tensor_storage import DTYPES, as_bytes, parse_dtype

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

INDEX_NAME = "index.json"
_KNOWN = frozenset(DTYPES.values())
_Index = dict[str, dict[str, Any]]


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: _Index | None = None
) -> _Index | None:
    """Write one tensor to ``<weight_name>.dat`` in an existing folder; replaces a file of that name.

    Args:
        weight: any dense tensor with values.
        weight_name: its name.
        offload_folder: the folder.
        index: gets the entry of the tensor, with dtype and shape, which is needed to read the file.

    Returns:
        ``index``.

    Raises:
        UnsupportedValueError: the tensor has no values, or is not dense.
        UnsafeCheckpointError: the name points outside the folder.
    """
    path = inside(Path(offload_folder), f"{weight_name}.dat")
    check_writable(weight_name, weight)
    plain = plain_on(weight, "cpu")
    # Accelerate reads the file with NumPy, which cannot map an empty file.
    content = as_bytes(plain) if plain.numel() else b"\0"
    replace_file(path, lambda temporary: write_bytes(temporary, content))
    if index is not None:
        index[weight_name] = {
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
        }
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Map a ``.dat`` file, privately: writing to the tensor never reaches the file.

    Args:
        weight_file: the file.
        weight_info: its entry of the index: ``dtype`` and ``shape``.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CorruptCheckpointError: the entry is invalid, or the file does not have the size that it gives.
    """
    path = Path(weight_file)
    dtype, shape = _described(str(path), weight_info)
    refuse_irregular(path)
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    count = math.prod(shape)
    # An empty tensor has one element in such a file, because NumPy cannot map an empty file.
    if size != count * dtype.itemsize and (count or size > dtype.itemsize):
        raise CorruptCheckpointError(
            f"{path} has {size} bytes, but {dtype} of shape {list(shape)}, as in its index, takes "
            f"{count * dtype.itemsize}: the index belongs to another model, or the file is truncated"
        )
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return map_file(path, size).view(dtype).view(shape)


def save_offload_index(index: _Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the ``index.json`` of a folder, which is replaced atomically; no entries write nothing.

    Raises:
        CorruptCheckpointError: the existing index cannot be read.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    merged = {**(_read_index(path) if path.exists() else {}), **index}
    replace_file(path, lambda temporary: write_bytes(temporary, json_bytes(merged)))


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors to a folder, which is created if it does not exist; the index is written last.

    Raises:
        UnsupportedValueError: a tensor has no values, or is not dense; nothing was written.
        UnsafeCheckpointError: a name points outside the folder; nothing was written.
    """
    folder = Path(save_dir)
    for name, tensor in state_dict.items():
        check_writable(name, tensor)
        inside(folder, f"{name}.dat")
    folder.mkdir(parents=True, exist_ok=True)
    index: _Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, folder, index)
    save_offload_index(index, folder)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights of such a folder into a model, on the CPU; ties are kept.

    Args:
        model: changed in place, after everything was checked.
        index: dtype and shape of the tensors to load, by name; None or empty loads nothing.
        offload_folder: folder of the files.

    Raises:
        StateMismatchError: the index names tensors that the model does not have, or with other shapes: it belongs to
            another model.
        CorruptCheckpointError: a file does not have the size that its entry gives.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    statistics = {name for name in weights if name.endswith("SCB") and f"{name[:-3]}weight" in weights}
    loaded = {name: weights[name] for name in weights}
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    problems = [
        problem
        for name, value in loaded.items()
        if name not in statistics and (problem := _misfit(name, value, own.get(name)))
    ]
    if problems:
        raise StateMismatchError(
            f"the offloaded weights in {offload_folder} belong to another model: {'; '.join(problems)}"
        )
    ties = find_tied_tensors(model)
    for name in loaded.keys() - statistics:
        scales = loaded.get(f"{name.removesuffix('weight')}SCB") if name.endswith("weight") else None
        set_module_tensor_to_device(model, name, "cpu", value=loaded[name], fp16_statistics=scales)
    retie_parameters(model, [[name for name in group if name in loaded] + group for group in ties])


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """A mapping of offloaded weights by name: in memory, in ``.dat`` files or in safetensors files, mapped on access.

    Args:
        state_dict: tensors in memory; they take precedence.
        save_folder: the folder of the ``.dat`` files.
        index: entries by name: ``dtype`` and ``shape`` of a ``.dat`` file, or ``safetensors_file`` with, optionally,
            ``weight_name`` (its name there) and ``dtype`` (to convert it to). Default: the ``index.json`` of
            ``save_folder``, which must not name files outside the folder.
        device: device of tensors from safetensors files.

    Raises:
        ValueError: no source was given.
        CheckpointNotFoundError: the folder has no index.
        UnsafeCheckpointError: the index of the folder names a file outside it.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "OffloadedWeightsLoader has no weights to load: pass state_dict (tensors in memory), save_folder (a "
                "folder with index.json) or index"
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = _own_index(Path(save_folder))
        self.index = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._shards: dict[Path, MappedShard] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            return self._from_safetensors(key, info)
        if self.save_folder is None:
            raise CheckpointNotFoundError(
                f"according to the index {key!r} is in a file {key}.dat, but no save_folder was given"
            )
        return load_offloaded_weight(inside(Path(self.save_folder), f"{key}.dat"), info)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __getstate__(self) -> dict[str, Any]:
        """A copy maps the files itself."""
        return {**vars(self), "_shards": {}}

    def _from_safetensors(self, key: str, info: Mapping[str, Any]) -> Tensor:
        path = Path(info["safetensors_file"])
        if path not in self._shards:
            self._shards[path] = MappedShard(path)
        shard, name = self._shards[path], info.get("weight_name", key)
        if name not in shard.header.entries:
            raise StateMismatchError(
                f"{path} has no tensor {name!r}, which the index gives for {key!r}: index and file do not belong "
                "together"
            )
        tensor = shard.tensor(name)
        if "dtype" in info:
            tensor = tensor.to(parse_dtype(info["dtype"]))
        return tensor if self.device is None else tensor.to(self.device)


class PrefixedDataset(Mapping[str, Tensor]):
    """A view of the items of a mapping whose keys begin with a prefix, with the prefix removed.

    Args:
        dataset: tensors by name; may load them on access.
        prefix: prefix of the names, with the dot.
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        if type(self.dataset).__contains__ is Mapping.__contains__:  # else it would load the tensor
            return any(name == f"{self.prefix}{key}" for name in self.dataset)
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: list[str]
) -> MutableMapping[str, Tensor]:
    """Select the entries of some submodules: names equal to one of these, or below one.

    ``"h.1"`` includes ``"h.1.weight"`` but not ``"h.10.weight"``.
    """
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }


def _described(what: str, info: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    try:
        dtype, shape = parse_dtype(info["dtype"]), tuple(info["shape"])
        if dtype not in _KNOWN or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
            raise ValueError("an unknown dtype, or a size that is not a natural number")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the index entry of {what} is {info!r}, which cannot be read: {error!r}. It must be an object with a "
            "dtype and a shape"
        ) from error
    return dtype, shape


def _read_index(path: Path) -> _Index:
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(info, dict) for info in content.values()):
        raise CorruptCheckpointError(f"{path} does not map names of tensors to their descriptions")
    return content


def _own_index(folder: Path) -> _Index:
    """The index of a folder. It is not trusted: it must not name files outside the folder."""
    index = _read_index(folder / INDEX_NAME)
    for name, info in index.items():
        file = info.get("safetensors_file")
        if file is None:
            inside(folder, f"{name}.dat")
            continue
        if not isinstance(file, str):
            raise CorruptCheckpointError(
                f"{folder / INDEX_NAME} gives {name!r} the file {file!r}, which is not a name"
            )
        info["safetensors_file"] = str(_file_inside(folder, file))
    return index


def _file_inside(folder: Path, file: str) -> Path:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(folder.absolute()):
        file = path.relative_to(folder.absolute()).as_posix()
    return inside(folder, file)


def _misfit(name: str, value: Tensor, own: Tensor | None) -> str | None:
    if own is None:
        return f"the model has no {name!r}"
    if own.shape != value.shape:
        return f"{name!r} has the shape {tuple(value.shape)}, in the model {tuple(own.shape)}"
    if own.dtype.is_floating_point != value.dtype.is_floating_point and value.dtype not in (
        torch.int8,
        torch.uint8,
    ):
        return f"{name!r} has the dtype {value.dtype}, in the model {own.dtype}"
    return None
