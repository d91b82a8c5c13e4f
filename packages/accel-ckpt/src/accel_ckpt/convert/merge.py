"""Merging sharded checkpoints into plain files of weights, a tensor at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointNotFoundError, CheckpointSaveError, UnsupportedValueError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.folder import Folder
from accel_ckpt.foreign.pieces import PiecedTensor, PiecedWeights
from accel_ckpt.foreign.sources import PiecedFolder, Source, find_source, open_pieces, refuse_several_models
from accel_ckpt.format.index import index_text, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.writer import FileRecord, write_safetensors_from, write_torch
from accel_ckpt.loading.load_state import open_training_state
from accel_ckpt.modules.names import canonical_state_dict, listed
from accel_ckpt.modules.versions import renamed_versions, versions_metadata, with_versions
from accel_ckpt.saving.plan import PlannedTensor, convert_file_size_to_int, plan_shards, shard_file_names
from accel_ckpt.saving.save_model import named_index
from accel_ckpt.tensor_storage import DTYPE_NAMES
from accel_state.messages import warn

__all__ = ["merge_fsdp_weights", "merge_weights"]

Progress = Callable[[int, int], None]


def merge_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    *,
    max_shard_size: int | str | None = None,
    progress: Progress | None = None,
    disk: Disk = LOCAL,
) -> tuple[str, ...]:
    """Merge the weights of any checkpoint into ``model.safetensors``, or into shards with an index.

    Needs no process group, and runs no code from the checkpoint. Only one tensor at a time is in memory, or one piece
    of a tensor that is cut by rows; with ``safe_serialization=False`` all tensors of one output file.

    Args:
        checkpoint_dir: a Distributed Checkpoint of torch, or the folder that Accelerate or transformers put it
            in; an FSDP checkpoint in one file, or in files of each rank; safetensors files of each rank, as torch's
            Hugging Face writer saves them; shards with an index; a training state, or a folder of `save_model`. The
            last three may be URIs of object storage, whose weights are fetched first.
        output_path: the folder, created if it does not exist, or a URI. Other weights in it are replaced, as by
            `save_model`.
        safe_serialization: write safetensors, else files of ``torch.save``.
        remove_checkpoint_dir: afterwards, remove the folder that held the weights and nothing else.
        max_shard_size: bytes per file, or a size such as ``"5GB"``; ``None``: one file.
        progress: called with the bytes written and the total bytes.
        disk: the file system to write to.

    Returns:
        The names of the files written, the index included.

    Raises:
        CheckpointNotFoundError: there are no weights, or several models; the message says what to pass.
        CheckpointSaveError: the output would replace the input, or it is a file or training state; or the folder to be
            removed holds more than weights. Nothing is written then.
        CorruptCheckpointError: a file is damaged or missing.
        UnsafeCheckpointError: reading would run code.
        UnsupportedValueError: safetensors does not know a dtype.
    """
    given, output = find_folder(checkpoint_dir), find_folder(output_path)
    limit = None if max_shard_size is None else convert_file_size_to_int(max_shard_size)
    if remove_checkpoint_dir and not given.on_this_machine:
        raise CheckpointSaveError(
            f"remove_checkpoint_dir removes a local folder, and {given.path} is none; leave it out"
        )
    checkpoint, let_go = given.local_weights()
    if not checkpoint.exists():
        raise CheckpointNotFoundError(f"there is no file or folder {checkpoint}")
    refuse_several_models(checkpoint)
    source = find_source(checkpoint)
    output.check_for_weights()
    _check_output(source, output)
    if remove_checkpoint_dir:
        _check_removal(source, output)
    _warn_of_extra(checkpoint)
    weights = _canonical(open_pieces(source), is_own=(_folder(source) / MANIFEST_NAME).exists())
    if safe_serialization:
        _check_dtypes(weights)
    written = _Merge(weights, safe_serialization, progress, disk).write(output, limit)
    if remove_checkpoint_dir:
        shutil.rmtree(_folder(source))
    let_go()
    return written


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Accelerate's name for :func:`merge_weights`."""
    merge_weights(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)


def _folder(source: Source) -> Path:
    return source.folder if isinstance(source, PiecedFolder) else source.files[0].parent


def _check_output(source: Source, output: Folder) -> None:
    """The output's folder is cleared of other weights, which must not be those that are read."""
    if not output.on_this_machine:
        return
    files, place = source.files, output.path.resolve()
    if isinstance(source, PiecedFolder) and place == source.folder.resolve():
        raise CheckpointSaveError(
            f"{output.path} is the checkpoint that is to be merged; choose another folder"
        )
    clash = [path for path in files if path.resolve().parent == place and is_weight_file(path.name)]
    if clash:
        raise CheckpointSaveError(
            f"{output.path} holds {clash[0].name}, which is to be merged, and the merge would replace it; choose "
            "another folder"
        )


def _check_removal(source: Source, output: Folder) -> None:
    folder = _folder(source)
    if output.on_this_machine and output.path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointSaveError(
            f"{output.path} is inside {folder}, which is to be removed; choose another folder"
        )
    if (folder / MANIFEST_NAME).exists():
        raise CheckpointSaveError(
            f"{folder} is a training state, which holds more than weights; it is not removed. Leave out "
            "remove_checkpoint_dir"
        )
    if source.files:
        known = {path.name for path in source.files}
        others = [path.name for path in sorted(folder.iterdir()) if path.name not in known]
        others = [name for name in others if not name.endswith(".index.json")]
        if others:
            raise CheckpointSaveError(
                f"{folder} holds more than the weights ({', '.join(others[:5])}); it is not removed. Leave out "
                "remove_checkpoint_dir, or move them"
            )


def _warn_of_extra(checkpoint: Path) -> None:
    """Warn of entries of a training state's model that are not tensors; plain files of weights leave them out."""
    if not (checkpoint / MANIFEST_NAME).is_file():
        return
    extra = open_training_state(checkpoint, verify=False).extra_state(0)
    if extra:
        warn(
            f"{checkpoint}: these entries are not tensors, so they are not merged: {listed([*extra])}. "
            "load_checkpoint_in_model takes them from the training state"
        )


def _canonical(weights: PiecedWeights, is_own: bool) -> PiecedWeights:
    """Rename weights canonically; in checkpoints of other programs, a ``module.`` before all names is a wrapper's."""
    names = {name: name for name in weights.about}
    new = {old: name for name, old in canonical_state_dict(names).items()}
    if not is_own and all(name.startswith("module.") for name in new.values()):
        new = {old: name.removeprefix("module.") for old, name in new.items()}
    return PiecedWeights(
        {new[name]: tensor for name, tensor in weights.tensors.items()},
        {new[alias]: new[name] for alias, name in weights.aliases.items()},
        renamed_versions(weights.versions, new),
    )


def _check_dtypes(weights: PiecedWeights) -> None:
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedValueError(
                f"the tensor {name!r} has the dtype {tensor.dtype}, which safetensors does not know; pass "
                "safe_serialization=False (--unsafe_serialization)"
            )


class _Merge:
    """One merge; counts what it has written."""

    def __init__(
        self, weights: PiecedWeights, safe_serialization: bool, progress: Progress | None, disk: Disk
    ) -> None:
        self.weights = weights
        self.safe = safe_serialization
        self.disk = disk
        self.total = sum(tensor.nbytes for tensor in weights.tensors.values())
        self._done = 0
        self._progress = progress

    def write(self, output: Folder, limit: int | None) -> tuple[str, ...]:
        tensors = self.weights.tensors
        planned = [PlannedTensor(name, tensor.nbytes) for name, tensor in tensors.items()]
        shards = plan_shards(planned, max(1, self.total) if limit is None else limit)
        stem, extension = ("model", "safetensors") if self.safe else ("pytorch_model", "bin")
        names = shard_file_names(len(shards), stem, extension)
        parts = {
            file: {n: tensors[n] for n in shard.names} for file, shard in zip(names, shards, strict=True)
        }
        index = None
        if len(parts) > 1:
            places = {name: file for file, part in parts.items() for name in part}
            if not self.safe:
                places |= {alias: places[name] for alias, name in self.weights.aliases.items()}
            index = index_text(places, self.total)
        write = self._safetensors if self.safe else self._pickle
        writers = {file: partial(write, part) for file, part in parts.items()}
        return output.publish_weights(writers, named_index(index, self.safe), self.disk)

    def _aliases(self, part: Mapping[str, PiecedTensor]) -> dict[str, str]:
        return {alias: name for alias, name in self.weights.aliases.items() if name in part}

    def _safetensors(self, part: Mapping[str, PiecedTensor], path: Path, disk: Disk) -> FileRecord:
        about = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()}
        metadata = {"format": "pt", **versions_metadata(self.weights.versions), **self._aliases(part)}

        def runs(name: str) -> Iterator[torch.Tensor]:
            for run in part[name].runs():
                size = run.numel() * run.element_size()
                yield run
                del run  # before the next one is read
                self._count(size)

        return write_safetensors_from(path, about, runs, metadata, disk)

    def _pickle(self, part: Mapping[str, PiecedTensor], path: Path, disk: Disk) -> FileRecord:
        whole = {name: tensor.whole() for name, tensor in part.items()}
        named = {**whole, **{a: whole[name] for a, name in self._aliases(part).items()}}
        record = write_torch(path, with_versions(named, self.weights.versions), disk)
        self._count(sum(tensor.nbytes for tensor in part.values()))
        return record

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)
