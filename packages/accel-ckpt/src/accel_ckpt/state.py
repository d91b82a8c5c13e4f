"""The training state of a run: model weights, shared trees, and the trees of each rank, in one committed
folder.

A *tree* is nested dictionaries and lists of tensors and plain data. Its tensors go to a safetensors file
under names that say where in the tree they stand, everything else to tagged JSON (:mod:`accel_ckpt.tags`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from accel_ckpt import tags
from accel_ckpt.commit import Contribution, commit
from accel_ckpt.coordination import Coordinator, default_coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingPartError,
    UnsupportedValueError,
)
from accel_ckpt.index import inside
from accel_ckpt.leftovers import restore_interrupted_swaps
from accel_ckpt.manifest import Manifest
from accel_ckpt.model import plan_model_files
from accel_ckpt.names import canonical_state_dict
from accel_ckpt.plan import convert_file_size_to_int
from accel_ckpt.reader import check_digest, file_digest, read_json, read_pickled, read_tensors
from accel_ckpt.writer import FileRecord, FileWriter, write_json, write_safetensors

__all__ = ["RankState", "TrainingCheckpoint", "Tree", "open_training_state", "save_training_state"]

Tree: TypeAlias = Any
"""Nested dictionaries and lists of tensors and plain data."""

_EXTRA = "model_{}.extra"


def save_training_state(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Tree],
    per_rank: Mapping[str, Tree],
    safe_serialization: bool = True,
    each_node: bool = False,
    before_write: Callable[[Path], None] | None = None,
    max_shard_size: int | str = "10GB",
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Save a training state so that it exists completely or not at all. Collective.

    Args:
        directory: the checkpoint's folder. One that exists is replaced as a whole, in one step; files in it
            that no save of a training state wrote are carried over.
        models: full state dicts with canonical names, read on the writing rank only. Entries that are not
            tensors (``get_extra_state``) are kept with the shared trees.
        shared: name → tree; read on the writing rank only.
        per_rank: name → tree, this rank's own; such as its random number generators.
        safe_serialization: weights as safetensors, or as ``.bin`` of ``torch.save``.
        each_node: the first rank of every node writes a folder of its own, for file systems that nodes do not
            share.
        before_write: called on every rank with the temporary folder, before anything is written or `models` is
            read; files that it adds become part of the checkpoint, and it may change `models` in place.
        max_shard_size: bytes per file of weights, or a size such as ``"5GB"``.
        coordinator: the ranks; those of the process group by default.
        disk: where.

    Returns:
        The folder, absolute.

    Raises:
        CheckpointSaveError: writing failed, here or on another rank. On every rank; what was there before is
            unchanged.
        UnsupportedValueError: a tree holds something that cannot be saved exactly; names the path to it.
    """
    limit = convert_file_size_to_int(max_shard_size)
    ranks = coordinator or default_coordinator()
    writer = ranks.local_rank == 0 if each_node else ranks.rank == 0

    def write(folder: Path) -> Contribution:
        if before_write is not None:
            before_write(folder)
        files: dict[str, FileRecord] = {}
        homes: tuple[tuple[str, ...], ...] = ()
        # Trees first: what cannot be saved is found before the large files are written.
        files |= _write_trees(folder, _rank_stem(ranks.rank), per_rank, disk)
        if writer:
            weights, extra = _split_models(models)
            files |= _write_trees(folder, "state", {**shared, **extra}, disk)
            for index, state_dict in enumerate(weights):
                records = _write_model(folder, index, state_dict, limit, safe_serialization, disk)
                files |= records
                homes = (*homes, tuple(name for name in records if not name.endswith(".json")))
        return Contribution(files, homes)

    return commit(Path(directory), write, coordinator=ranks, each_node=each_node, disk=disk)


def open_training_state(directory: str | os.PathLike[str], *, verify: bool = True) -> TrainingCheckpoint:
    """Open a training state. Sizes of all files are checked here, contents when they are read.

    Args:
        directory: a folder that :func:`save_training_state` wrote.
        verify: check the checksum of every file that is read, before anything of it is returned.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a complete training state.
        CheckpointVersionError: it was written by a newer version.
        CorruptCheckpointError: its manifest is damaged, or a file is missing or has another size.
    """
    folder = Path(os.path.abspath(Path(directory).expanduser()))
    restore_interrupted_swaps(folder.parent)
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    return TrainingCheckpoint(folder, manifest, verify)


class TrainingCheckpoint:
    """A complete training state on disk. Every access reads; tensors are on the CPU, writable, and not tied
    to the files.
    """

    def __init__(self, directory: Path, manifest: Manifest, verify: bool) -> None:
        self.directory = directory
        self.manifest = manifest
        self._verify = verify

    @property
    def models(self) -> Sequence[dict[str, Any]]:
        """The state dict of each model, tied names included."""
        return _Models(self)

    @property
    def shared(self) -> Mapping[str, Tree]:
        """The shared trees by name."""
        trees = self._read_trees("state")
        extra = {_EXTRA.format(i) for i in range(len(self.manifest.models))}
        return RankState(
            "the shared state", {name: tree for name, tree in trees.items() if name not in extra}
        )

    def per_rank(self, rank: int, *, allow_missing: bool = False) -> Mapping[str, Tree] | None:
        """The trees of one rank by name.

        Args:
            rank: the rank that saved them.
            allow_missing: return ``None`` if the checkpoint has no such rank, as when the world has grown.

        Raises:
            CheckpointNotFoundError: the checkpoint holds nothing of this rank.
        """
        if rank not in self.manifest.ranks:
            if allow_missing:
                return None
            raise CheckpointNotFoundError(
                f"{self.directory} holds no state of rank {rank}: it was saved by {self.manifest.world_size} "
                f"ranks, and "
                f"holds {list(self.manifest.ranks)}. Load with as many ranks, or allow the state to be "
                f"missing"
            )
        return RankState(f"the state of rank {rank}", self._read_trees(_rank_stem(rank)))

    def verify(self) -> None:
        """Read every file and check its checksum.

        Raises:
            CorruptCheckpointError: names the file that has changed.
        """
        self.manifest.check_content(self.directory)

    def _checksum(self, name: str) -> str | None:
        if name not in self.manifest.files:
            raise CorruptCheckpointError(
                f"{self.directory / name} is not listed in the manifest of its checkpoint"
            )
        return self.manifest.files[name].xxh3 if self._verify else None

    def _read_trees(self, stem: str) -> dict[str, Tree]:
        tensors: dict[str, torch.Tensor] = {}
        if f"{stem}.safetensors" in self.manifest.files:
            path = inside(self.directory, f"{stem}.safetensors")
            _, tensors = read_tensors(path, self._checksum(path.name))
        path = inside(self.directory, f"{stem}.json")
        content = read_json(path, self._checksum(path.name))

        def find(name: str) -> torch.Tensor:
            if name not in tensors:
                raise CorruptCheckpointError(
                    f"{path} refers to the tensor {name!r}, which is in no file beside it"
                )
            return tensors[name]

        try:
            return {name: tags.decode(tree, find) for name, tree in content.items()}
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error

    def _read_model(self, index: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name in self.manifest.models[index]:
            path = inside(self.directory, name)
            checksum = self._checksum(name)
            if path.suffix == ".safetensors":
                header, tensors = read_tensors(path, checksum)
                result |= tensors
                result |= {alias: tensors[original] for alias, original in header.aliases.items()}
            else:
                if checksum is not None:
                    check_digest(path, file_digest(path), checksum)
                result |= read_pickled(path, mapped=False)
        result.update(self._read_trees("state").get(_EXTRA.format(index), {}))
        return result


class _Models(Sequence[dict[str, Any]]):
    def __init__(self, checkpoint: TrainingCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __len__(self) -> int:
        return len(self._checkpoint.manifest.models)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"the checkpoint {self._checkpoint.directory} holds {len(self)} models; {index} was asked for"
            )
        return self._checkpoint._read_model(index % len(self))


class RankState(Mapping[str, Tree]):
    """Trees by name; asking for one that was not saved says which were."""

    def __init__(self, what: str, trees: Mapping[str, Tree]) -> None:
        self._what = what
        self._trees = trees

    def __getitem__(self, name: str) -> Tree:
        try:
            return self._trees[name]
        except KeyError:
            raise MissingPartError(
                f"{self._what} in this checkpoint has no part {name!r}; it has "
                f"{', '.join(sorted(self._trees)) or 'none'}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)


def _rank_stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def _write_trees(folder: Path, stem: str, trees: Mapping[str, Tree], disk: Disk) -> dict[str, FileRecord]:
    tensors: dict[str, torch.Tensor] = {}

    def sink(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        name = base = ".".join(str(part) for part in path)
        number = 1
        while name in tensors:  # {"a.b": x, "a": {"b": y}}
            number += 1
            name = f"{base}~{number}"
        tensors[name] = tensor
        return name

    encoded = {}
    encoder = tags.Encoder(sink)
    for name, tree in trees.items():
        if not isinstance(name, str):
            raise UnsupportedValueError(
                f"parts of a training state have names; {name!r} is a {type(name).__name__}"
            )
        encoded[name] = encoder.encode(tree, (name,))
    files = {f"{stem}.json": write_json(folder / f"{stem}.json", encoded, disk)}
    if tensors:
        files[f"{stem}.safetensors"] = write_safetensors(
            folder / f"{stem}.safetensors", tensors, {"format": "pt"}, disk
        )
    return files


def _split_models(
    models: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, torch.Tensor]], dict[str, Tree]]:
    weights, extra = [], {}
    for index, state_dict in enumerate(models):
        named = canonical_state_dict(state_dict)
        weights.append({name: value for name, value in named.items() if isinstance(value, torch.Tensor)})
        if rest := {name: value for name, value in named.items() if not isinstance(value, torch.Tensor)}:
            extra[_EXTRA.format(index)] = rest
    return weights, extra


def _write_model(
    folder: Path,
    index: int,
    state_dict: Mapping[str, torch.Tensor],
    limit: int,
    safe_serialization: bool,
    disk: Disk,
) -> dict[str, FileRecord]:
    stem = ("model" if safe_serialization else "pytorch_model") + (f"_{index}" if index else "")
    files = plan_model_files(state_dict, limit, safe_serialization, stem)
    records = {name: files.write(folder / name, part, disk) for name, part in files.shards.items()}
    if files.index is not None:
        name = f"{stem}.{'safetensors' if safe_serialization else 'bin'}.index.json"
        with FileWriter(folder / name, disk) as file:
            file.write(files.index.encode())
            records[name] = file.finish()
    return records
