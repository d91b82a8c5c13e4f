"""Reading the training state of a run, which ``accel_ckpt.saving.save_state`` wrote."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from accel_ckpt.coordination.ranks import Coordinator, broadcast
from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingPartError,
    StateMismatchError,
)
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.folder import OpenFolder
from accel_ckpt.format import tagged_json
from accel_ckpt.format.index import inside
from accel_ckpt.format.memory import Arena
from accel_ckpt.format.reader import MappedShard, parse_json, read_text
from accel_ckpt.format.saved_tensors import SavedTensor, SavedTensors, fill_all, verify_all
from accel_ckpt.format.state_files import EXTRA, is_part_file, model_stem, rank_stem, tensor_files
from accel_ckpt.format.tagged_json import Tree
from accel_ckpt.modules.versions import with_versions
from accel_ckpt.parts import Leaf

__all__ = [
    "NamedTrees",
    "ReadForAll",
    "SavedWeights",
    "TrainingCheckpoint",
    "open_training_state",
    "read_for_all",
]

logger = logging.getLogger(__name__)

_SHARED = "state"


class ReadForAll(NamedTuple):
    """What the first rank has read of a training state for all; the sizes of all its files are checked."""

    directory: str
    """Its absolute path, or URI."""
    manifest: bytes
    """The text of its manifest."""
    shared: bytes
    """The text of its shared trees."""
    checkpoint: TrainingCheckpoint | None = None
    """On the first rank, what it has opened; not sent."""


def read_for_all(find: Callable[[], str | os.PathLike[str]], ranks: Coordinator) -> ReadForAll | None:
    """Read on the first rank what concerns all of them, so that a load opens few files in a world of any size.

    Collective. Returns ``None`` if the first rank finds nothing that holds for all: each rank then opens the state
    itself, and fails with the error that belongs to it.

    Args:
        find: returns the folder or URI of the state; called on the first rank.
        ranks: that load.
    """
    own = _read_for_all(find) if ranks.rank == 0 else None
    told: ReadForAll | None = broadcast(own and own._replace(checkpoint=None), ranks)
    return own or told


def _read_for_all(find: Callable[[], str | os.PathLike[str]]) -> ReadForAll | None:
    try:
        found = open_training_state(find())
        # Each node may have a folder of its own, and the main process alone writes few files.
        if len(found.manifest.ranks) < found.manifest.world_size:
            return None
        shared = found._texts[_SHARED] = found.text(_SHARED)
        return ReadForAll(str(found.directory), found.opened.text, shared, found)
    except Exception as error:
        # The others wait for an answer. Then each rank opens the state, and raises what belongs to it.
        logger.info("the first rank reads nothing for all: %s", error)
        return None


def open_training_state(
    directory: str | os.PathLike[str], *, verify: bool = True, known: ReadForAll | None = None
) -> TrainingCheckpoint:
    """Open a training state. Sizes of all files are checked here, contents when they are read.

    From object storage only the files that are read are fetched, to a folder of ``tempfile`` that is removed when the
    returned object is no longer used.

    Args:
        directory: a folder that ``save_training_state`` wrote, or its URI.
        verify: check the checksum of every file that is read, before anything of it is returned.
        known: what the first rank has read; of use if it is of the same folder. Another copy is read by itself.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a complete training state.
        CheckpointVersionError: it was written by a newer version.
        CorruptCheckpointError: its manifest is damaged, or a file is missing or has another size.
        StateMismatchError: it is not the state that the first rank reads.
    """
    folder = find_folder(directory)
    if known is None:
        return TrainingCheckpoint(folder.open(verify))
    if str(folder.absolute) != known.directory:
        opened = folder.open(verify)
        if opened.text != known.manifest:
            raise StateMismatchError(
                f"{opened.directory} is another state than {known.directory}, which the first rank loads. Give the "
                "same one on all ranks"
            )
        return TrainingCheckpoint(opened)
    return known.checkpoint or TrainingCheckpoint(
        folder.open(verify, known.manifest), {_SHARED: known.shared}
    )


class TrainingCheckpoint:
    """A complete training state on disk, or in object storage.

    Every access reads; tensors are on the CPU, writable, and not tied to the files.
    """

    def __init__(self, opened: OpenFolder, texts: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.directory = opened.directory
        self.manifest = opened.manifest
        self.opened = opened
        self._folder = opened.files
        self._check = opened.checks
        self._texts = dict(texts)
        self._parsed: dict[str, dict[str, Any]] = {}

    def local_folder(self) -> Path:
        """The folder of the files on this machine; files in object storage are fetched first.

        Raises:
            CorruptCheckpointError: a fetched file was damaged or changed after the save.
        """
        self._check.fetch(self._files(self.manifest.files))
        return self._folder

    @property
    def models(self) -> Sequence[dict[str, Any]]:
        """The state dict of each model, tied names included."""
        return _Models(self)

    @property
    def shared(self) -> Mapping[str, Tree]:
        """The shared trees by name."""
        return self._shared((), ())

    def mapped_shared(self, mapped: Collection[str]) -> Mapping[str, Tree]:
        """Read the shared trees; tensors of the trees in ``mapped`` are views of the files, for immediate copying.

        The files are checked first, and must not change while the views are in use.
        """
        return self._shared(mapped, ())

    def lazy_shared(self, lazy: Collection[str]) -> Mapping[str, Tree]:
        """Read the shared trees; tensors of the trees in ``lazy`` are ``SavedTensor``, of which only headers are read.

        ``load_optimizer_state`` takes such a tree, and reads the values directly into the optimizer's states.
        """
        return self._shared((), lazy)

    def lazy_trees(self, rank: int | None = None, names: Collection[str] | None = None) -> Mapping[str, Tree]:
        """Read trees in which ``SavedTensor`` takes the place of tensors, of which only headers are read.

        Args:
            rank: the rank whose trees are read; None: the shared trees.
            names: the trees that are read; None: all.
        """
        stem = _SHARED if rank is None else rank_stem(rank)
        every = self._described(stem)[1]
        return self._read_trees(stem, lambda name: names is None or name in names, lazy=every)

    def _shared(self, mapped: Collection[str], lazy: Collection[str]) -> Mapping[str, Tree]:
        extra = {EXTRA.format(i) for i in range(len(self.manifest.models))}
        trees = self._read_trees(_SHARED, lambda name: name not in extra, mapped, lazy)
        return NamedTrees("the shared state", trees)

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
                f"ranks, and holds {list(self.manifest.ranks)}. Load with the same number of ranks, or allow the state "
                "to be missing"
            )
        return NamedTrees(f"the state of rank {rank}", self._read_trees(rank_stem(rank)))

    def verify(self) -> None:
        """Read every file and check its checksum.

        Raises:
            CorruptCheckpointError: names the file that has changed.
        """
        self.opened.check_content()

    def _read_trees(
        self,
        stem: str,
        wanted: Callable[[str], bool] = lambda name: True,
        mapped: Collection[str] = (),
        lazy: Collection[str] = (),
    ) -> dict[str, Tree]:
        """Trees by name; files of tensors are only read if one of these trees holds some."""
        path, content = self._described(stem)
        opened: list[Mapping[str, Any]] = []
        views: list[Mapping[str, torch.Tensor]] = []
        copies: dict[str, torch.Tensor] = {}
        arena = Arena()
        damaged: list[CorruptCheckpointError] = []  # what files of tensors say, which name themselves

        @contextlib.contextmanager
        def of_tensors() -> Iterator[None]:
            try:
                yield
            except CorruptCheckpointError as error:
                damaged.append(error)
                raise

        def find(name: str) -> Any:
            if not opened:
                with of_tensors():
                    opened.append(self._tensors(self._state_files(stem), stem))
            if name not in opened[0]:
                raise CorruptCheckpointError(
                    f"{path} refers to the tensor {name!r}, which is in no file beside it"
                )
            return opened[0][name]

        def copy(name: str) -> torch.Tensor:
            if name not in copies:
                found = find(name)
                with of_tensors():
                    copies[name] = found.read(arena.empty)
            return copies[name]

        def view(name: str) -> torch.Tensor:
            if not views:
                with of_tensors():
                    views.append(self._mapped(self._files(self._state_files(stem))))
            return views[0][name] if name in views[0] else copy(name)

        try:
            return {
                name: tagged_json.decode(tree, find if name in lazy else view if name in mapped else copy)
                for name, tree in content.items()
                if wanted(name)
            }
        except CorruptCheckpointError as error:
            if error in damaged:
                raise
            raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error

    def _described(self, stem: str) -> tuple[Path, dict[str, Any]]:
        """The file that describes trees, and what it holds, which is parsed once for all that ask for some of it."""
        path = inside(self._folder, f"{stem}.json")
        if stem not in self._parsed:
            content = parse_json(self._texts[stem] if stem in self._texts else self.text(stem), str(path))
            if not isinstance(content, dict):
                raise CorruptCheckpointError(f"{path} does not hold trees by name")
            self._parsed[stem] = content
        return path, self._parsed[stem]

    def text(self, stem: str) -> bytes:
        """Read the file that describes trees.

        Args:
            stem: of the file.

        Raises:
            CorruptCheckpointError: it was damaged or changed after the save.
        """
        path = inside(self._folder, f"{stem}.json")
        self._check.fetch([path])
        return read_text(path, self.opened.checksum(path.name))

    def _state_files(self, stem: str) -> list[str]:
        return tensor_files(self.manifest.files, stem)

    def _files(self, names: Iterable[str]) -> list[Path]:
        return [inside(self._folder, name) for name in names]

    def _tensors(self, names: Iterable[str], stem: str) -> SavedTensors:
        """The tensors in some files."""
        return SavedTensors(self._files(names), self._check, stem, self.manifest.layout)

    def _mapped(self, files: Iterable[Path]) -> dict[str, torch.Tensor]:
        """Views of the whole tensors in safetensors files, which are checked first."""
        found: dict[str, torch.Tensor] = {}
        paths = [path for path in files if not is_part_file(path.name)]
        self._check.fetch(paths)
        for path in paths:
            shard = MappedShard(path)
            self._check.mapped(shard)
            found |= {name: shard.tensor(name) for name in shard.header.entries}
            found |= {alias: found[original] for alias, original in shard.header.aliases.items()}
        return found

    def weights(self, index: int) -> SavedWeights:
        """The weights of a model: names, shapes and dtypes; values are read only where they go."""
        names = self.manifest.models[index]
        tensors = self._tensors(names, model_stem(index, True))
        return SavedWeights(self.directory, tensors, self.extra_state(index))

    def load_model(self, index: int, tensors: Mapping[str, Leaf]) -> None:
        """Fill tensors of a model in place; of a divided tensor only this rank's part is read.

        The tensors may be divided in another way than when they were saved, or not at all.

        Args:
            index: index of the model.
            tensors: by name; each a tensor, a ``DTensor``, a :class:`accel_ckpt.Part`, or a list of parts.

        Raises:
            StateMismatchError: a name is missing, or has another shape. Nothing was changed.
            CorruptCheckpointError: a file was damaged or changed after the save. Nothing was changed.
        """
        self.weights(index).fill(tensors)

    def load_shared(self, tensors: Mapping[str, Leaf]) -> None:
        """Fill tensors of the shared trees in place, by their names in the files, such as
        ``optimizer_0.state.model_0.weight.exp_avg``.
        """
        saved = self._tensors(self._state_files(_SHARED), _SHARED)
        fill_all(saved.pairs(tensors))

    def mapped_model(self, index: int, weights: SavedWeights | None = None) -> dict[str, Any]:
        """The state dict of a model for immediate copying: where possible, tensors are views of the files.

        The files are checked first, and must not change while the views are in use.

        Args:
            index: index of the model.
            weights: those of the model, where they were asked for.
        """
        files = self._files(self.manifest.models[index])
        views = self._mapped(path for path in files if path.suffix == ".safetensors")
        return (weights or self.weights(index)).state_dict(views)

    def models_with_extra(self) -> frozenset[int]:
        """The models whose state dicts have entries that are not tensors (``get_extra_state``)."""
        names = {EXTRA.format(index): index for index in range(len(self.manifest.models))}
        return frozenset(names[name] for name in self._read_trees(_SHARED, lambda name: name in names))

    def extra_state(self, index: int) -> Mapping[str, Any]:
        """The entries of a model's state dict that are not tensors, by name."""
        extra = EXTRA.format(index)
        found: Mapping[str, Any] = self._read_trees(_SHARED, lambda name: name == extra).get(extra, {})
        return found


class SavedWeights:
    """The weights of a saved model: names, shapes and dtypes from the headers of its files.

    :meth:`fill` reads values directly into their targets, so a rank needs memory only for its part.
    """

    def __init__(self, directory: Path, tensors: SavedTensors, extra: Mapping[str, Any]) -> None:
        self.directory = directory
        self.tensors: Mapping[str, SavedTensor] = tensors
        """Tensors by name, tied names included."""
        self.extra = extra
        """Entries of the state dict that are not tensors (``get_extra_state``)."""
        self.versions: Mapping[str, int] = tensors.versions
        """Versions of the modules that load their state dict by themselves, by name."""
        self._pairs = tensors.pairs
        self._verify = tensors.verify

    @property
    def names(self) -> list[str]:
        """Names of the tensors, tied names included."""
        return list(self.tensors)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole tensors, by name."""
        return {name: saved.shape for name, saved in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors, by name."""
        return {name: saved.dtype for name, saved in self.tensors.items()}

    @property
    def about(self) -> dict[str, Any]:
        """The entries of the state dict by name, with shape and dtype in place of tensors, which are not read."""
        return with_versions({**self.tensors, **self.extra}, self.versions)

    def verify(self) -> None:
        """Check the content of all files of the model.

        Raises:
            CorruptCheckpointError: a file is not what was written.
        """
        self._verify()

    def check(self, targets: Mapping[str, Leaf]) -> None:
        """Check that :meth:`fill` can fill these targets, and check the files that this rank reads for it.

        Changes nothing, so that all ranks can agree before any of them changes something.

        Raises:
            StateMismatchError: a name is missing, or has another shape.
            CorruptCheckpointError: a file is not what was written.
        """
        verify_all(self._pairs(targets))

    def fill(self, targets: Mapping[str, Leaf]) -> None:
        """Fill tensors in place with this rank's part of each; values of another dtype are converted.

        Args:
            targets: by name; each a tensor, a ``DTensor``, a :class:`accel_ckpt.Part`, or a list of parts (``[]``
                where this rank holds nothing). Names that are left out are not read.

        Raises:
            StateMismatchError: a name is missing, or has another shape. Nothing was changed.
            CorruptCheckpointError: a file is not what was written. Nothing was changed.
        """
        fill_all(self._pairs(targets))

    def state_dict(self, known: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """The state dict of the model, with tensors as :meth:`read` returns them."""
        return with_versions({**self.read(known), **self.extra}, self.versions)

    def read(self, known: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Read all tensors whole, on the CPU, each in its own memory; tied names share it.

        Args:
            known: tensors to take instead of reading them.
        """
        arena = Arena()
        found = dict(known or {})
        wanted = {saved.name: saved for name, saved in self.tensors.items() if name not in found}
        whole = {name: saved for name, saved in wanted.items() if saved.pickled is None}
        read = {name: arena.empty(saved.shape, saved.dtype) for name, saved in whole.items()}
        fill_all([(saved, read[name]) for name, saved in whole.items()])
        read |= {name: saved.read() for name, saved in wanted.items() if name not in read}
        return {
            name: found[name] if name in found else read[saved.name] for name, saved in self.tensors.items()
        }


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
        return self._checkpoint.weights(index % len(self)).state_dict()


class NamedTrees(Mapping[str, Tree]):
    """Trees by name; the error for a name that was not saved lists the saved names."""

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

    def __contains__(self, name: object) -> bool:
        return name in self._trees

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)
