"""Opening the weights of a checkpoint: names, shapes and dtypes first, values one tensor at a time."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from accel_ckpt import hub
from accel_ckpt.coordination.ranks import Coordinator, run_together
from accel_ckpt.errors import CorruptCheckpointError, FileChangedError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.foreign.dcp import DCP_METADATA
from accel_ckpt.foreign.pieces import PiecedWeights
from accel_ckpt.foreign.sources import PiecedFolder, find_source, open_pieces
from accel_ckpt.format.index import WeightFiles
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.memory import collector_paused
from accel_ckpt.format.reader import MappedShard, read_pickled_model
from accel_ckpt.loading.load_state import open_training_state
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.versions import versions_of
from accel_ckpt.tensor_storage import flat_bytes
from accel_state.world.process import PartialState

__all__ = ["BroadcastWeights", "MappedWeights", "WeightSource", "fingerprint_of", "open_weights"]


# Bytes of tensors that are sent together.
_BATCH = 1 << 24


class TensorInfo(Protocol):
    """Shape and dtype of a tensor, known before it is read; tensors satisfy this protocol themselves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as a ``torch.Size`` or a plain sequence."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""


class _Announced(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


_OTHER_FRAMEWORKS = ("tf", "flax")

About = Mapping[str, TensorInfo]
Pair = tuple[str, str]


class WeightSource(Protocol):
    """Tensors of a checkpoint by name; shapes are known before anything is read."""

    @property
    def about(self) -> About:
        """Shape and dtype of every tensor."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """Extra state that is not a tensor, by name; only files of ``torch.save`` hold any."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Name of a module → the version in which it saved its state dict, if known."""

    @property
    def fingerprint(self) -> str:
        """Identifies the files: changes with their paths, sizes, modification times and inodes."""

    def is_mapped(self, name: str) -> bool:
        """Whether a tensor is a view of a mapped safetensors file, which needs no memory of its own."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor to the CPU; a private view if ``is_mapped``, else in its own memory."""

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """Find the pairs of names whose values differ. With broadcast weights all ranks get the same result."""

    def begin(self, names: Sequence[str]) -> None:
        """Announce the tensors that will be read, each once, preferably in this order; collective with broadcasts."""

    def finish(self) -> None:
        """End the reading.

        Raises:
            FileChangedError: a file was changed since it was opened.
        """


def open_weights(
    checkpoint: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None
) -> WeightSource:
    """Open the weights in a file, an index or a folder: read and check the headers, but no tensors yet.

    Folders of torch's Distributed Checkpoint are read too, also those that Accelerate wrote.

    Args:
        checkpoint: the file, index or folder. From a URI of object storage the weights are fetched to a folder of
            ``tempfile``. A string ``org/name`` is a repository of a hub if there is no such local path.
        revision: revision of the repository: branch, tag or commit.
        token: for a private repository; by default the token of the last login.

    Raises:
        TypeError: ``checkpoint`` is not a path.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(
            f"the checkpoint is a {type(checkpoint).__qualname__}; pass the path of a folder, file or index, or the "
            "name of a repository of the hub as 'owner/name'. Load tensors in memory with model.load_state_dict"
        )
    if hub.is_repo_id(checkpoint) and not Path(checkpoint).exists():
        checkpoint = hub.fetch_weights(str(checkpoint), revision, token)
    elif revision is not None or token is not None:
        raise ValueError(
            f"revision and token are for repositories of a hub, and {os.fspath(checkpoint)!r} is none; leave them out"
        )
    folder = find_folder(checkpoint)
    local, let_go = folder.local_weights()
    source = _open_local(local, folder.path)
    weakref.finalize(source, let_go)  # until then the files are there
    return source


def _open_local(folder: Path, place: Path) -> MappedWeights | _PiecesOfWeights:
    """Weights in local files, which may be those of a training state at another place."""
    source = find_source(folder)
    with collector_paused():
        weights = MappedWeights(source) if isinstance(source, WeightFiles) else _PiecesOfWeights(source)
    if (folder / MANIFEST_NAME).is_file():  # a training state, which keeps extra state with the shared trees
        weights.objects |= open_training_state(place, verify=False).extra_state(0)
    return weights


def fingerprint_of(files: Iterable[Path]) -> str:
    """Identify files, and detect changes of them, without reading them."""
    facts = []
    for path in files:
        status = path.stat()
        facts.append((str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ino))
    return xxhash.xxh3_128_hexdigest(repr(facts).encode("utf-8", "surrogateescape"))


class _Files:
    """Base of all weights in local files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.objects: dict[str, Any] = {}
        self.versions: dict[str, int] = {}
        self.fingerprint = fingerprint_of(files)

    def begin(self, names: Sequence[str]) -> None:
        """Nothing has to be prepared."""

    def finish(self) -> None:
        """Look at the files once more."""
        if fingerprint_of(self._files) != self.fingerprint:
            raise FileChangedError(
                f"{listed([*map(str, self._files)])}: a file was changed or replaced while the weights were loaded, so "
                "that they may be a mixture; load them again"
            )


def _differing(source: WeightSource, pairs: Sequence[Pair]) -> set[Pair]:
    return {
        (first, second)
        for first, second in pairs
        if not _are_equal(source.tensor(first), source.tensor(second))
    }


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether values are equal, or their bytes, as of values that do not equal themselves (NaN)."""
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    if (alike and a.data_ptr() == b.data_ptr()) or torch.equal(a, b):
        return True
    return alike and torch.equal(flat_bytes(a.contiguous()), flat_bytes(b.contiguous()))


class _MappedPickle(NamedTuple):
    """The tensors of a file of ``torch.save``, which PyTorch has mapped, and the size of the file then."""

    content: Mapping[str, torch.Tensor]
    path: Path
    size: int

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of a tensor.

        Raises:
            FileChangedError: the file has another size: reading past its end would end the process.
        """
        if self.path.stat().st_size != self.size:
            raise FileChangedError(f"{self.path} has another size than when it was opened; load it again")
        tensor = self.content[name].resolve_conj().resolve_neg()
        return tensor.clone(memory_format=torch.contiguous_format)


class MappedWeights(_Files):
    """Weights in local files; tensors of safetensors files are views of them.

    Tensors of ``torch.save`` files are copied, because ``torch.save`` writes in place: saving a model over the file
    that its weights are views of would crash the process and destroy the file.

    Args:
        files: the files, and the file of each tensor according to the index.
    """

    def __init__(self, files: WeightFiles) -> None:
        super().__init__(files.files)
        self._homes: dict[str, MappedShard | _MappedPickle] = {}
        self._keys: dict[str, str] = {}  # of names that are another tensor's in their file
        self.about: dict[str, TensorInfo] = {}
        for path in files.files:
            self._add(path, files.weight_map)
        absent = sorted(
            name for name in files.weight_map or () if name not in self.about and name not in self.objects
        )
        if absent:
            raise CorruptCheckpointError(
                f"the index says that {listed(absent)} are in {listed([*map(str, files.files)])}, but they are not"
            )

    def _add(self, path: Path, weight_map: Mapping[str, Path] | None) -> None:
        def is_here(name: str) -> bool:
            home = path if weight_map is None else weight_map.get(name, path)
            return home is path or home == path

        if path.suffix != ".safetensors":
            size = path.stat().st_size
            content, objects = read_pickled_model(path)
            home = _MappedPickle(content, path, size)
            self.objects |= {name: value for name, value in objects.items() if is_here(name)}
            self.versions |= versions_of(content)
            for name in filter(is_here, content):
                self._homes[name], self.about[name] = home, content[name]
            return
        shard = MappedShard(path)
        if (kind := shard.header.metadata.get("format")) in _OTHER_FRAMEWORKS:
            raise CorruptCheckpointError(
                f"{path} was written for the framework {kind!r}, whose layers hold weights in another order; load "
                "it with a library that converts them, as transformers does, and save it from there"
            )
        entries, aliases = shard.header.entries, shard.header.aliases
        self.versions |= shard.header.versions
        for name in filter(is_here, entries):
            self._homes[name], self.about[name] = shard, entries[name]
        again = (
            shard.again()
        )  # a model may not tie what the file does: the second name gets memory of its own
        for alias in filter(is_here, aliases):
            self._homes[alias], self._keys[alias] = again, aliases[alias]
            self.about[alias] = entries[aliases[alias]]

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor is a view of a safetensors file."""
        home = self._homes[name]
        return isinstance(home, MappedShard) and home.is_view(self.key_of(name))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU."""
        home = self._homes[name]
        if isinstance(home, MappedShard):
            return home.tensor(self._keys.get(name, name))
        return home.tensor(name)

    def key_of(self, name: str) -> str:
        """The name under which a file holds the tensor."""
        return self._keys.get(name, name)

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """The pairs of names whose values differ."""
        return _differing(self, [pair for pair in pairs if self.about[pair[0]] is not self.about[pair[1]]])


def _files_of_dcp(folder: Path) -> list[Path]:
    """The files of the checkpoint alone: the folder may also hold offloaded weights."""
    return sorted(path for path in folder.iterdir() if path.name == DCP_METADATA or path.suffix == ".distcp")


class _PiecesOfWeights(_Files):
    """Weights of which a file may hold a part only; each is put together in memory."""

    def __init__(self, source: PiecedFolder) -> None:
        super().__init__(source.files or _files_of_dcp(source.folder))
        self._pieces: PiecedWeights = open_pieces(source)
        self.about: About = self._pieces.about
        self.versions |= self._pieces.versions

    def is_mapped(self, name: str) -> bool:
        """False: tensors are put together in memory."""
        return False

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._pieces.tensor(name)

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """The pairs of names whose values differ."""
        return _differing(self, pairs)


class BroadcastWeights:
    """Weights that only rank 0 opens; it sends every tensor that any rank needs to all ranks.

    Tensors are sent in one order for all ranks, whatever order a rank reads them in: tensors that arrive before the
    requested one are kept if they are needed later.

    Args:
        checkpoint: the checkpoint that rank 0 opens; other ranks need no access to it.
        coordinator: the ranks.
        revision: revision of a repository.
        token: token for a repository.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        coordinator: Coordinator,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> None:
        self._opened: WeightSource | None = None
        self._coordinator = coordinator
        self._stream: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._held: dict[str, torch.Tensor] = {}
        self._needed: set[str] = set()

        def open_on_rank_0() -> Any:
            if coordinator.rank:
                return None
            self._opened = opened = open_weights(checkpoint, revision=revision, token=token)
            about = {n: _Announced(tuple(info.shape), info.dtype) for n, info in opened.about.items()}
            return about, opened.fingerprint, dict(opened.objects), dict(opened.versions)

        self.about: About
        self.fingerprint: str
        self.objects: dict[str, Any]
        self.versions: dict[str, int]
        answers = run_together(open_on_rank_0, coordinator, doing=f"opening the checkpoint {checkpoint}")
        self.about, self.fingerprint, self.objects, self.versions = answers[0]

    def is_mapped(self, name: str) -> bool:
        """True on rank 0 for tensors of mapped files; other ranks have no files."""
        return self._opened is not None and self._opened.is_mapped(name)

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """Find the pairs of all ranks whose values differ, on rank 0. Collective."""
        asked = [tuple(pair) for answer in self._coordinator.exchange(list(pairs)) for pair in answer]
        if not asked:
            return set()
        found = self._opened.differing(asked) if self._opened is not None else set()
        first: set[Pair] = self._coordinator.exchange(found)[0]
        return first

    def begin(self, names: Sequence[str]) -> None:
        """Agree on what is sent, and in which order. Collective."""
        self._needed = set(names)
        asked = self._coordinator.exchange(list(names))
        # Rank 0's own order matters least: what it holds for later is a view, if it is of safetensors.
        order = dict.fromkeys(name for answer in reversed(asked) for name in answer)
        self._stream = itertools.chain.from_iterable(map(self._send, self._batches(order)))

    def tensor(self, name: str) -> torch.Tensor:
        """Receive a tensor; on rank 0, read it from its file. Collective."""
        while name not in self._held:
            sent, value = next(self._stream)
            if sent in self._needed:
                self._held[sent] = value
        return self._held.pop(name)

    def finish(self) -> None:
        """Take part in sending the tensors that other ranks still need."""
        for _ in self._stream:
            pass
        if self._opened is not None:
            self._opened.finish()

    def _batches(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Small tensors together: a message for each would take longer than its values."""
        batch: list[str] = []
        room = _BATCH
        for name in names:
            info = self.about[name]
            nbytes = math.prod(info.shape) * info.dtype.itemsize
            if batch and nbytes > room:
                yield batch
                batch, room = [], _BATCH
            batch.append(name)
            room -= nbytes
        if batch:
            yield batch

    def _send(self, names: list[str]) -> list[tuple[str, torch.Tensor]]:
        import torch.distributed as dist

        from accel_state.operations.collectives import broadcast

        on_host = "gloo" in dist.get_backend() or "mpi" in dist.get_backend()
        device = torch.device("cpu") if on_host else PartialState().device
        if self._opened is not None:
            own = [self._opened.tensor(name) for name in names]
            broadcast([tensor.to(device) for tensor in own])
            return list(zip(names, own, strict=True))
        about = [self.about[name] for name in names]
        arrived = broadcast([torch.empty(info.shape, dtype=info.dtype, device=device) for info in about])
        return list(zip(names, arrived, strict=True))
