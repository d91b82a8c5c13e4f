"""Finding the weights in any layout, and opening them so that one tensor at a time is in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from accel_ckpt.foreign.dcp import DCP_METADATA, DcpFolder, is_dcp_folder
from accel_ckpt.foreign.pieces import Piece, PiecedTensor, PiecedWeights
from accel_ckpt.foreign.rank_files import RANK_FILE, RankFiles, rank_files
from accel_ckpt.format.index import WeightFiles, find_weights, inside, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.model_entries import model_entries
from accel_ckpt.format.reader import read_entry, read_header, read_pickled_weights
from accel_ckpt.format.sharding import is_divided, places_of
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.versions import versions_of
from accel_ckpt.tensor_storage import tied_aliases
from accel_state.messages import warn

__all__ = ["FSDP_FILE", "FSDP_FOLDER", "PiecedFolder", "Source", "find_source", "open_pieces", "source_of"]

_RANK_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # of the same writer
_FSDP_RANK = re.compile(r"pytorch_model_fsdp_(?P<n>\d+)_rank\d+\.bin")
FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_(?P<n>\d+)")
"""A folder in which Accelerate saves a model in torch's Distributed Checkpoint."""
FSDP_FILE = re.compile(r"pytorch_model_fsdp(?:_(?P<n>\d+))?\.bin")
"""A file in which Accelerate saves a whole model under FSDP; the first has no number."""


@dataclass(frozen=True, slots=True)
class PiecedFolder:
    """A folder in which tensors are in pieces: of torch's Distributed Checkpoint, or files of each rank."""

    folder: Path
    files: tuple[Path, ...] = ()
    """The safetensors files, or those of `RankFiles`; empty for a Distributed Checkpoint."""


Source = PiecedFolder | WeightFiles


def find_source(checkpoint: Path) -> Source:
    """Find the weights of a file, an index, or a folder.

    A folder is, tried in this order: a Distributed Checkpoint of torch; an FSDP checkpoint of Accelerate, with
    ``pytorch_model_fsdp_0/``, ``pytorch_model_fsdp_0_rank*.bin`` or ``pytorch_model_fsdp.bin``; safetensors files in
    which every rank wrote its own pieces; whole files as `find_weights` finds them. The file of one rank stands for
    those of all ranks.

    Raises:
        CheckpointNotFoundError: it is none of these, or several; names what to pass.
    """
    checkpoint = checkpoint.expanduser()
    if not checkpoint.is_dir():
        match = RANK_FILE.fullmatch(checkpoint.name)
        if match is None:
            return find_weights(checkpoint)
        of_ranks = rank_files(checkpoint.with_name(match["stem"]))
        return PiecedFolder(checkpoint.parent, tuple(of_ranks.values()))
    if is_dcp_folder(checkpoint):
        return PiecedFolder(checkpoint)
    if (checkpoint / MANIFEST_NAME).is_file():
        return _find_own(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    for pattern, what in ((FSDP_FOLDER, "folder"), (_FSDP_RANK, "first file"), (FSDP_FILE, "file")):
        matches = [(match["n"], name) for name in reversed(names) if (match := pattern.fullmatch(name))]
        found = [checkpoint / name for name in sorted(dict(matches).values())]
        found = [path for path in found if path.is_file() or is_dcp_folder(path)]
        if len(found) > 1:
            raise CheckpointNotFoundError(
                f"{checkpoint} holds several models; pass the {what} of the one you mean: "
                f"{', '.join(map(str, found))}"
            )
        if found:
            return PiecedFolder(found[0]) if what == "folder" else find_source(found[0])
    # Only files of names that no other program uses are asked whether they hold pieces: headers can be long.
    files = [checkpoint / name for name in names if name.endswith(".safetensors")]
    odd = bool(files) and not any(is_weight_file(path.name) for path in files)
    if (
        odd
        and not list(checkpoint.glob("*.index.json"))
        and all(is_divided(read_header(path)) for path in files)
    ):
        return PiecedFolder(checkpoint, tuple(files))
    try:
        return find_weights(checkpoint)
    except CheckpointNotFoundError as error:
        below = [path for path in sorted(checkpoint.iterdir()) if path.is_dir() and _has_weights(path)]
        if not below:
            raise
        raise CheckpointNotFoundError(
            f"{checkpoint} holds no weights itself; pass one of the folders in it that do: "
            f"{', '.join(map(str, below))}"
        ) from error


def _has_weights(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    known = {DCP_METADATA, "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"}
    patterns = (FSDP_FOLDER, _FSDP_RANK, FSDP_FILE)
    return bool(names & known) or any(pattern.fullmatch(name) for pattern in patterns for name in names)


def open_pieces(source: Source) -> PiecedWeights:
    """Open weights so that only one tensor, or one piece of a tensor that is cut by rows, is in memory at a time.

    Raises:
        CorruptCheckpointError: a file is damaged, or pieces are missing.
        UnsafeCheckpointError: a file would run code.
        CheckpointNotFoundError: the folder does not hold a model.
    """
    if isinstance(source, WeightFiles):
        if len(source.files) == 1:
            _refuse_one_of_many(source.files[0])
        return _open_files(source.files, source.weight_map)
    if source.files and (match := RANK_FILE.fullmatch(source.files[0].name)):
        return _open_ranks(source.folder / match["stem"])
    return _open_files(source.files) if source.files else _open_dcp(source.folder)


def _open_ranks(stem: Path) -> PiecedWeights:
    if not FSDP_FOLDER.fullmatch(stem.name):
        raise CheckpointNotFoundError(
            f"{stem}_rank*.bin hold the state of an optimizer, and no weights; pass pytorch_model_fsdp_*_rank0.bin"
        )
    content = RankFiles(stem)
    tensors = content.pieces()
    _warn_of_others([name for name in content.tree if name not in tensors], stem)
    return PiecedWeights(tensors)


def _find_own(folder: Path) -> Source:
    models = Manifest.read(folder).models
    return source_of(folder, models[0]) if models else find_weights(folder)


def source_of(folder: Path, names: Sequence[str]) -> Source:
    """The files of one model of a training state."""
    files = tuple(inside(folder, name) for name in names)
    divided = any(path.suffix == ".safetensors" and is_divided(read_header(path)) for path in files)
    return PiecedFolder(folder, files) if divided else WeightFiles(files)


def refuse_several_models(folder: Path) -> None:
    """Refuse a training state with more than one model, with an error that says which file to pass.

    Raises:
        CheckpointNotFoundError: the state holds several models.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return
    models = Manifest.read(folder).models
    if len(models) > 1:
        paths = [str(_entry(folder, names)) for names in models]
        raise CheckpointNotFoundError(
            f"{folder} holds {len(models)} models; pass the file of the one you mean: {', '.join(paths)}"
        )


def _entry(folder: Path, names: Sequence[str]) -> Path:
    """The file to pass for a model: its only one, or its index."""
    stem, extension = re.sub(r"-\d{5}-of-\d{5}(?=\.)", "", names[0]).split(".", 1)
    index = folder / f"{stem}.{extension}.index.json"
    return index if len(names) > 1 and index.is_file() else folder / names[0]


def _open_dcp(folder: Path) -> PiecedWeights:
    content = DcpFolder(folder)
    if content.top_keys() == ["optimizer"]:
        beside = folder.absolute().parent / folder.absolute().name.replace("optimizer", "pytorch_model_fsdp")
        raise CheckpointNotFoundError(
            f"{folder} holds the state of an optimizer, and no weights; pass the folder of a model"
            + (f": {beside}" if is_dcp_folder(beside) and beside != folder.absolute() else "")
        )
    by_key = {key: name for name, key in content.keys.items()}
    entries = model_entries({key: name in content.tensors for key, name in by_key.items()}, folder)
    names = {by_key[key]: plain for key, plain in entries.items()}
    _warn_of_others([name for name in names if name not in content.tensors], folder)
    return PiecedWeights(
        {plain: content.tensors[name] for name, plain in names.items() if name in content.tensors}
    )


def _warn_of_others(left_out: Sequence[str], where: Path) -> None:
    if left_out:
        warn(f"{where}: these entries are not tensors, so they are left out: {', '.join(left_out)}")


def _open_files(files: Sequence[Path], weight_map: Mapping[str, Path] | None = None) -> PiecedWeights:
    found: dict[str, list[tuple[Piece, tuple[int, ...] | None, torch.dtype]]] = {}
    aliases: dict[str, str] = {}
    versions: dict[str, int] = {}
    pickled = _LastFile()

    def add(path: Path, name: str, piece: Piece, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        if weight_map is None or weight_map.get(name, path) == path:
            found.setdefault(name, []).append((piece, shape, dtype))

    for path in files:
        if path.suffix == ".safetensors":
            header = read_header(path)
            aliases |= header.aliases
            versions |= header.versions
            for name, place in places_of(header).items():
                entry = header.entries[name]
                add(
                    path,
                    name,
                    Piece(place.offsets, entry.shape, partial(read_entry, entry)),
                    place.shape,
                    entry.dtype,
                )
        else:
            content = pickled(path)
            aliases |= tied_aliases(content)
            versions |= versions_of(content)
            for name, value in content.items():
                shape = tuple(value.shape)
                piece = Piece((0,) * len(shape), shape, partial(pickled.tensor, path, name))
                add(path, name, piece, shape, value.dtype)
    where = str(files[0].parent if len(files) > 1 else files[0])
    tensors = {
        name: PiecedTensor(name, _whole_shape(parts), parts[0][2], [piece for piece, _, _ in parts], where)
        for name, parts in found.items()
        if name not in aliases
    }
    if absent := sorted(set(weight_map or ()) - set(tensors) - set(aliases)):
        raise CorruptCheckpointError(f"the index names {listed(absent)}, which are not in the files")
    return PiecedWeights(tensors, aliases, versions)


def _whole_shape(parts: Sequence[tuple[Piece, tuple[int, ...] | None, torch.dtype]]) -> Sequence[int]:
    """The whole shape that a file gives, or for torch's writer, which gives none, the extent of all pieces."""
    said = [shape for _, shape, _ in parts if shape is not None]
    ends = [[o + n for o, n in zip(piece.offsets, piece.sizes, strict=True)] for piece, _, _ in parts]
    return said[0] if said else [max(sizes) for sizes in zip(*ends, strict=True)]


def _refuse_one_of_many(path: Path) -> None:
    if path.suffix != ".safetensors":
        return
    header = read_header(path)
    by_torch = _RANK_FILE.fullmatch(path.name) is not None and is_divided(header)
    places = places_of(header)
    part = any(
        any(place.offsets) or place.shape not in (None, header.entries[name].shape)
        for name, place in places.items()
    )
    if by_torch or part:
        raise CheckpointNotFoundError(f"{path} holds the pieces of one rank; pass its folder {path.parent}")


class _LastFile:
    """Files of ``torch.save``, of which the one asked for last is kept."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._content: Mapping[str, torch.Tensor] = {}

    def __call__(self, path: Path) -> Mapping[str, torch.Tensor]:
        if path != self._path:
            self._content = {}
            self._content, self._path = read_pickled_weights(path), path
        return self._content

    def tensor(self, path: Path, name: str) -> torch.Tensor:
        return self(path)[name]
