"""Saving the weights of a model, and single objects, in files that other programs can read."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from accel_ckpt import hub
from accel_ckpt.coordination.write_notices import completed_by_writer
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.format.index import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, index_text
from accel_ckpt.format.pickled_data import TORCH_SAFE_GLOBALS, plain_data
from accel_ckpt.format.reader import is_extra_state
from accel_ckpt.format.writer import FileRecord, PlannedFile, check_writable, write_safetensors, write_torch
from accel_ckpt.locations import location
from accel_ckpt.modules.names import canonical_state_dict
from accel_ckpt.modules.versions import versions_metadata, versions_of, with_versions
from accel_ckpt.saving.plan import (
    PlannedTensor,
    Shard,
    convert_file_size_to_int,
    plan_shards,
    shard_file_names,
)
from accel_ckpt.tensor_storage import (
    clean_state_dict_for_safetensors,
    id_tensor_storage,
    is_lazy,
    tied_aliases,
    why_not_plain,
)
from accel_state.messages import first_line
from accel_state.trees import recursively_apply

__all__ = ["load", "save", "save_model"]


def save_model(
    model: nn.Module | Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    push_to_hub: str | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    writer: int | None = None,
    disk: Disk = LOCAL,
) -> tuple[str, ...]:
    """Save a model's weights as ``model.safetensors`` (or ``pytorch_model.bin``), in shards if they are large.

    The calling process writes; call it on one rank, or with ``writer`` on all ranks. Files of an earlier
    ``save_model`` in the folder, shards and index of either format, are replaced as a whole: whatever interrupts the
    save, readers find all of the old weights or all of the new ones. Other files stay. No file is changed in place, so
    a process that has one mapped keeps its old content. Names are canonical:
    prefixes of DDP, ``torch.compile`` and other wrappers are left out. Of tied names the first is saved; the
    others are kept in the metadata, as ``safetensors.torch.save_model`` does.

    Args:
        model: a module, or a state dict of full tensors on any device.
        save_directory: the folder, created if it does not exist; or a URI of object storage.
        max_shard_size: bytes per file, or a size such as ``"5GB"``; 10 GB as in Accelerate. A larger tensor
            gets a file of its own. Several files get an index.
        safe_serialization: write safetensors, else files of ``torch.save``.
        push_to_hub: a repository ``org/name`` to upload the weights to afterwards, see :func:`push_to_hub`.
        token: for the upload; by default the token of the last login.
        private: whether a newly created repository is private.
        commit_message: message of the upload's commit.
        writer: the rank that writes. Other ranks may call: they return when the write is complete, and need no `model`.
        disk: the file system to write to.

    Returns:
        The names of the files written, the index included.

    Raises:
        CheckpointSaveError: the folder is a file or a training state; writing failed, and the message says which
            weights are there now; or the upload failed, and the weights are in the folder. On a waiting rank: the
            writer failed, has ended or does not make the call.
        MissingDependencyError: ``push_to_hub`` is given, and huggingface_hub is not installed.
        UnsupportedValueError: a tensor has no values (meta device), is sharded over ranks, or has a dtype or
            layout that the format does not know; or a module has extra state that is not a tensor, and the format is
            safetensors, or loading it would run code.
    """
    limit = convert_file_size_to_int(max_shard_size)
    if push_to_hub is not None:
        hub.check_repo_id(push_to_hub)
    elif given := [
        n for n, v in (("token", token), ("private", private), ("commit_message", commit_message)) if v
    ]:
        raise ValueError(f"{', '.join(given)} is for uploads; name the repository: push_to_hub='org/name'")
    folder = find_folder(save_directory)
    if push_to_hub is not None and not folder.on_this_machine:
        raise ValueError(
            f"push_to_hub uploads from a local folder, and {folder.path} is none; save to one first"
        )

    def write() -> tuple[str, ...]:
        state_dict, extra = weights_of(model)
        check_extra(extra, safe_serialization)
        folder.check_for_weights()
        stem = "model" if safe_serialization else "pytorch_model"
        files = plan_model_files(state_dict, limit, safe_serialization, stem, extra)
        writers = {file.name: file.write for file in files.files}
        index = named_index(files.index, safe_serialization)
        written = folder.publish_weights(writers, index, disk)
        if push_to_hub is not None:
            hub.push_to_hub(
                folder.path, push_to_hub, token=token, private=private, commit_message=commit_message
            )
        return written

    return write() if writer is None else completed_by_writer(folder.path, write, writer=writer)


def named_index(text: str | None, safe_serialization: bool) -> tuple[str, str] | None:
    """The name of the index of weights, and its text; None if there is none."""
    name = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
    return None if text is None else (name, text)


def weights_of(model: nn.Module | Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a module or state dict by canonical name, and extra state that is not a tensor."""
    if isinstance(model, nn.Module):
        state_dict = canonical_state_dict(model.state_dict(), model)
    else:
        state_dict = canonical_state_dict(model)
    extra = {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)}
    for name, value in extra.items():
        if not is_extra_state(name):
            raise no_weight(name, value)
    tensors = {name: value for name, value in state_dict.items() if name not in extra}
    return with_versions(tensors, versions_of(state_dict)), extra


def no_weight(name: str, value: object) -> UnsupportedValueError:
    """The error for an entry of a state dict that is not a tensor."""
    return UnsupportedValueError(
        f"{name!r} is a {type(value).__qualname__}, and weights are tensors; leave it out"
    )


def check_extra(extra: Mapping[str, object], safe_serialization: bool) -> None:
    """Refuse extra state of modules that a file cannot hold, or that could not be loaded from it.

    Args:
        extra: by name; none of it is a tensor.
        safe_serialization: which format.

    Raises:
        UnsupportedValueError: names it, and what holds it.
    """
    for name, value in extra.items():
        about = f"{name!r}, which get_extra_state of a module gives, is a {type(value).__qualname__}"
        if safe_serialization:
            raise UnsupportedValueError(
                f"{about}, but safetensors files hold only tensors; save with safe_serialization=False, or make "
                "get_extra_state return a tensor"
            )
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            load(file)
        except Exception as error:
            raise UnsupportedValueError(
                f"{about}, which could be loaded only by running code from the file: {first_line(error)}. Let "
                "get_extra_state return numbers, text, tensors, and lists and dictionaries of them"
            ) from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model."""

    files: tuple[PlannedFile, ...]
    index: str | None
    """The text of the index, where there are several files."""
    index_name: str


def plan_model_files(
    state_dict: Mapping[str, torch.Tensor],
    max_shard_size: int,
    safe_serialization: bool,
    stem: str,
    extra: Mapping[str, Any] | None = None,
) -> ModelFiles:
    """Decide which tensors go to which file; extra state that is not a tensor goes to the first.

    Raises:
        UnsupportedValueError: a tensor cannot be saved in this format.
    """
    for name, tensor in state_dict.items():
        if safe_serialization:
            check_writable(name, tensor)
        elif (reason := why_not_plain(tensor)) is not None and not _torch_saves(tensor):
            raise UnsupportedValueError(f"the tensor {name!r} {reason}")
    versions = versions_of(state_dict)
    aliases = tied_aliases(state_dict) if safe_serialization else {}
    kept = {name: tensor for name, tensor in state_dict.items() if name not in aliases}
    shards = plan_shards(
        [
            # torch.save keeps tensors tied within a file, so they must not be parted.
            PlannedTensor(
                name, t.numel() * t.element_size(), None if safe_serialization else id_tensor_storage(t)
            )
            for name, t in kept.items()
        ],
        max_shard_size,
    )
    extension = "safetensors" if safe_serialization else "bin"
    names = shard_file_names(len(shards), stem, extension)
    files = []
    for file, shard in zip(names, shards, strict=True):
        part = {name: kept[name] for name in shard.names}
        tied = {alias: name for alias, name in aliases.items() if name in part}
        metadata = {"format": "pt", **versions_metadata(versions), **tied} if safe_serialization else None
        files.append(PlannedFile(file, part, metadata, versions=versions))
    if extra:
        files[0] = replace(files[0], extra=extra)
    return ModelFiles(tuple(files), index_of(names, shards, extra or ()), f"{stem}.{extension}.index.json")


def index_of(files: Sequence[str], shards: Sequence[Shard], extra: Iterable[str] = ()) -> str | None:
    """The text of the index of shards, each in the file of the same place; None for one file, which needs none.

    Args:
        files: their names.
        shards: what is in each.
        extra: names of what is in the first besides tensors.
    """
    if len(shards) < 2:
        return None
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard.names}
    weight_map |= dict.fromkeys(extra, files[0])
    return index_text(weight_map, sum(shard.nbytes for shard in shards))


def _torch_saves(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and (tensor.is_quantized or tensor.layout != torch.strided)


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object on the main process, or on the main process of every node.

    Args:
        obj: anything that ``torch.save`` takes; with ``safe_serialization`` a dictionary of tensors.
        f: a path or a URI, whose old content stays until the new content is complete; or a binary file.
        save_on_each_node: save on the local main process of every node, not only on the main process.
        safe_serialization: write safetensors instead of ``torch.save``'s format.

    Raises:
        UnsupportedValueError: with ``safe_serialization``, the object is not a dictionary of tensors.
    """
    from accel_ckpt.coordination.ranks import is_saving_process

    if not is_saving_process(save_on_each_node):
        return
    if safe_serialization and not (
        isinstance(obj, Mapping) and all(isinstance(value, torch.Tensor) for value in obj.values())
    ):
        raise UnsupportedValueError(
            f"safetensors files hold tensors by name, but this {type(obj).__name__} holds something else; "
            "pass a dictionary of tensors, or safe_serialization=False"
        )
    cleaned = obj
    if safe_serialization:
        for name, value in obj.items():
            check_writable(name, value)
        cleaned = clean_state_dict_for_safetensors(obj)
    elif "torch_xla" in sys.modules:  # the file must be readable without torch_xla
        cleaned = recursively_apply(_from_xla, obj)
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            import safetensors.torch

            f.write(safetensors.torch.save(cleaned, metadata={"format": "pt"}))
        else:
            torch.save(cleaned, f)
        return

    def write(path: Path, disk: Disk) -> FileRecord:
        if safe_serialization:
            return write_safetensors(path, cleaned, {"format": "pt"}, disk)
        return write_torch(path, cleaned, disk)

    place = location(f)
    find_folder(place.parent).write_file(place.name, write)


def _from_xla(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.cpu() if leaf.device.type == "xla" else leaf


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file of ``torch.save``, without running code from it.

    Args:
        f: a path, a URI, or a binary file.
        map_location: as in ``torch.load``.
        **kwargs: more arguments of ``torch.load``. ``weights_only`` is ``True`` unless given; besides
            tensors, NumPy arrays and scalars of plain types are allowed.

    Raises:
        UnpicklingError: the file holds something else, or its data are invalid.
    """
    kwargs.setdefault("weights_only", True)
    if isinstance(f, (str, os.PathLike)):
        place = location(f)
        with find_folder(place.parent).file(place.name) as path:
            return _load(path, map_location, **kwargs)
    return _load(f, map_location, **kwargs)


def _load(f: Path | IO[bytes], map_location: Any, **kwargs: Any) -> Any:
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        content = torch.load(f, map_location=map_location, **kwargs)
    return plain_data(content) if kwargs["weights_only"] else content
