"""Reading the training state of a run, which ``accel_ckpt.saving.save_state`` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingPartError,
    UnsupportedValueError,
)
from accel_ckpt.format import tagged_json
from accel_ckpt.format.index import inside
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.format.reader import (
    Header,
    MappedShard,
    check_digest,
    file_digest,
    read_json,
    read_pickled,
    read_tensors,
)
from accel_ckpt.memory import Arena
from accel_ckpt.saving.leftovers import restore_interrupted_swaps
from accel_ckpt.saving.save_state import EXTRA, Tree, is_box_file, is_tensor_file, model_stem, rank_stem
from accel_ckpt.sharded import BoxFiles, load_tensors

__all__ = ["RankState", "TrainingCheckpoint", "open_training_state"]


def open_training_state(directory: str | os.PathLike[str], *, verify: bool = True) -> TrainingCheckpoint:
    """Open a training state. Sizes of all files are checked here, contents when they are read.

    Args:
        directory: a folder that ``save_training_state`` wrote.
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
        return self.mapped_shared(())

    def mapped_shared(self, mapped: Collection[str]) -> Mapping[str, Tree]:
        """The same, but the tensors of the trees in ``mapped`` are to copy from at once: views of the files.

        The files are checked first, and must stay as they are while the views are in use.
        """
        extra = {EXTRA.format(i) for i in range(len(self.manifest.models))}
        return RankState(
            "the shared state", self._read_trees("state", lambda name: name not in extra, mapped)
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
                f"ranks, and holds {list(self.manifest.ranks)}. Load with as many ranks, or allow the state "
                "to be missing"
            )
        return RankState(f"the state of rank {rank}", self._read_trees(rank_stem(rank)))

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

    def _read_trees(
        self, stem: str, wanted: Callable[[str], bool] = lambda name: True, mapped: Collection[str] = ()
    ) -> dict[str, Tree]:
        """Trees by name; files of tensors are only read if one of these trees holds some."""
        path = inside(self.directory, f"{stem}.json")
        content = read_json(path, self._checksum(path.name))
        if not isinstance(content, dict):
            raise CorruptCheckpointError(f"{path} does not hold trees by name")
        opened: list[dict[str, torch.Tensor]] = []
        copies: dict[str, torch.Tensor] = {}
        arena = Arena()

        def find(name: str) -> torch.Tensor:
            if not opened:
                opened.append(self._map_state_tensors(stem))
            if name not in opened[0]:
                raise CorruptCheckpointError(
                    f"{path} refers to the tensor {name!r}, which is in no file beside it"
                )
            return opened[0][name]

        def copy(name: str) -> torch.Tensor:
            if name not in copies:
                copies[name] = arena.copy(find(name))
            return copies[name]

        try:
            return {
                name: tagged_json.decode(tree, find if name in mapped else copy)
                for name, tree in content.items()
                if wanted(name)
            }
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error

    def _map_state_tensors(self, stem: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in self.manifest.files:
            if is_tensor_file(name, stem):
                tensors |= _map_tensors(inside(self.directory, name), self._checksum(name))[1]
        return tensors | self._read_boxes(name for name in self.manifest.files if is_box_file(name, stem))

    def _read_boxes(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        files = self._box_files(names)
        tensors = {name: files.whole(name) for name in files.shapes}
        return tensors | {alias: tensors[original] for alias, original in files.aliases.items()}

    def _box_files(self, names: Iterable[str]) -> BoxFiles:
        return BoxFiles((inside(self.directory, name) for name in names), self._checksum)

    def load_model(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors of a model in place; of a ``DTensor`` only the part that this rank holds is copied.

        The tensors may be divided otherwise than when they were saved, or not at all.

        Raises:
            StateMismatchError: a name is missing, or has another shape. Nothing was changed.
        """
        load_tensors(self._box_files(_only_safetensors(self.manifest.models[index], self.directory)), tensors)

    def load_shared(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same for tensors of the shared trees, by their names in the files, such as
        ``optimizer_0.state.model_0.weight.exp_avg``.
        """
        names = (n for n in self.manifest.files if is_box_file(n, "state") or is_tensor_file(n, "state"))
        load_tensors(self._box_files(names), tensors)

    def mapped_model(self, index: int) -> dict[str, Any]:
        """The same as ``models[index]``, but to copy from at once: where it can be, tensors are views of the files.

        The files are checked first, and must stay as they are while the views are in use.
        """
        return self._read_model(index, _map_tensors)

    def _read_model(
        self,
        index: int,
        read: Callable[[Path, str | None], tuple[Header, dict[str, torch.Tensor]]] = read_tensors,
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        names = self.manifest.models[index]
        divided = [name for name in names if is_box_file(name, model_stem(index, True))]
        for name in names:
            if name in divided:
                continue
            path = inside(self.directory, name)
            checksum = self._checksum(name)
            if path.suffix == ".safetensors":
                header, tensors = read(path, checksum)
                result |= tensors
                result |= {alias: tensors[original] for alias, original in header.aliases.items()}
            else:
                if checksum is not None:
                    check_digest(path, file_digest(path), checksum)
                result |= read_pickled(path, mapped=False)
        result |= self._read_boxes(divided)
        extra = EXTRA.format(index)
        result.update(self._read_trees("state", lambda name: name == extra).get(extra, {}))
        return result


def _map_tensors(path: Path, xxh3: str | None) -> tuple[Header, dict[str, torch.Tensor]]:
    shard = MappedShard(path, xxh3)
    return shard.header, {name: shard.tensor(name) for name in shard.header.entries}


def _only_safetensors(names: Iterable[str], directory: Path) -> Iterable[str]:
    for name in names:
        if not name.endswith(".safetensors"):
            raise UnsupportedValueError(
                f"{directory / name} was saved with safe_serialization=False and can only be read as a whole; use "
                "checkpoint.models"
            )
        yield name


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
