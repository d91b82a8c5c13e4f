"""Finding the files of a set of weights, without leaving its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.format.reader import parse_json, read_json
from accel_ckpt.modules.names import listed

__all__ = [
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WeightFiles",
    "changed_index",
    "files_of_index",
    "find_weights",
    "index_text",
    "inside",
    "is_weight_file",
    "read_index",
]

SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
_WEIGHT_FILE = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin"
    r"|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json"
)
_YIELDS_TO = "yields_to"
"""Key of an index's metadata: the single file that counts instead, if it is there; see ``folders/weight_switch.py``."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a set of weights and, if there is an index, the file of each tensor."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, Path] | None = None


def inside(folder: Path, name: str) -> Path:
    """The path of a file that a checkpoint names, if it stays in the folder.

    The layout of the Hugging Face cache is allowed: ``snapshots/<revision>/file`` linked to ``blobs/<hash>``
    of the same repository.

    Raises:
        UnsafeCheckpointError: the name is absolute, leaves the folder with ``..``, or is a link out of it.
    """
    parts = PurePosixPath(name).parts
    windows = PureWindowsPath(name)
    if (
        not parts
        or PurePosixPath(name).is_absolute()
        or windows.drive
        or windows.root
        or ".." in (*parts, *windows.parts)
    ):
        raise UnsafeCheckpointError(
            f"the checkpoint in {folder} names the file {name!r}, which is not inside its folder"
        )
    path = folder.joinpath(*parts)
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL
        raise UnsafeCheckpointError(
            f"the checkpoint in {folder} names the file {name!r}, which cannot be followed: {error}"
        ) from error
    if not (target.is_relative_to(root) or _is_hub_blob(target, root)):
        raise UnsafeCheckpointError(f"{path} is a link to {target}, which is outside the checkpoint's folder")
    return path


def _is_hub_blob(target: Path, folder: Path) -> bool:
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots":
            return target.parent == (parent.parent.parent / "blobs").resolve()
    return False


def read_index(path: Path) -> WeightFiles:
    """Read an index: ``{"weight_map": {name: file}}``, or the map alone.

    Raises:
        CheckpointNotFoundError: the index or a file that it names does not exist.
        CorruptCheckpointError: the index does not map names to files.
        UnsafeCheckpointError: it names a file outside its folder.
    """
    weight_map = _weight_map(read_json(path), str(path))
    resolved = {file: inside(path.parent, file) for file in dict.fromkeys(weight_map.values())}
    missing = [str(file) for file in resolved.values() if not file.is_file()]
    if missing:
        raise CheckpointNotFoundError(f"{path} names files that are not there: {listed(missing)}")
    return WeightFiles(tuple(resolved.values()), {name: resolved[file] for name, file in weight_map.items()})


def _weight_map(content: Any, what: str) -> dict[str, str]:
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptCheckpointError(
            f'{what} does not map names of tensors to names of files, as {{"weight_map": …}} or flat'
        )
    return weight_map


def files_of_index(raw: bytes) -> set[str]:
    """The names of the files in the text of an index.

    Raises:
        CorruptCheckpointError: the text is not an index.
    """
    return set(_weight_map(parse_json(raw, "the index"), "the index").values())


def changed_index(raw: bytes, *, home: str = "", yields_to: str | None = None) -> str:
    """The text of an index, changed for the time in which weights replace others.

    Args:
        raw: the text.
        home: the folder in which the files are, beside the index.
        yields_to: a file that counts instead of the index as soon as, or while, it is there.

    Raises:
        CorruptCheckpointError: the text is not an index.
    """
    content = parse_json(raw, "the index")
    weight_map = {
        name: f"{home}/{file}" if home else file for name, file in _weight_map(content, "the index").items()
    }
    metadata = content.get("metadata") if "weight_map" in content else None
    metadata = {**metadata} if isinstance(metadata, dict) else {}
    if yields_to is not None:
        metadata[_YIELDS_TO] = yields_to
    return _text({"metadata": metadata, "weight_map": weight_map})


def _yields(index: Path, single: str) -> bool:
    content = read_json(index)
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return isinstance(metadata, dict) and metadata.get(_YIELDS_TO) == single


def index_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """Write the text of an index, as other libraries do."""
    return _text({"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def is_weight_file(name: str) -> bool:
    """Whether `save_model` writes files of this name, so that a later save into the folder removes the file."""
    return _WEIGHT_FILE.fullmatch(name) is not None


def find_weights(checkpoint: Path) -> WeightFiles:
    """Find the files of a checkpoint: a file, an index, or a folder.

    In a folder, ``model.safetensors`` or its index comes before ``pytorch_model.bin`` or its index, and then
    any single other index, and then any single other safetensors file, which is how diffusers saves.

    Raises:
        CheckpointNotFoundError: there are no weights, or more than one candidate.
    """
    if checkpoint.is_file():
        return read_index(checkpoint) if checkpoint.suffix == ".json" else WeightFiles((checkpoint,))
    if not checkpoint.is_dir():
        raise CheckpointNotFoundError(
            f"there is no file or folder {checkpoint}; give the folder, "
            "file or index of a checkpoint, or the name of a repository of the hub as 'owner/name'"
        )
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        found = [checkpoint / name for name in (single, index) if (checkpoint / name).is_file()]
        if len(found) == 2 and _yields(found[1], single):
            return WeightFiles((found[0],))
        if len(found) == 2:
            files = read_index(found[1])
            if found[0] not in files.files:
                raise CheckpointNotFoundError(
                    f"{checkpoint} holds both {single} and {index}, which belong to different saves; pass the "
                    "one you mean"
                )
            return files
        if found:
            return find_weights(found[0])
    for pattern, read in (("*.index.json", read_index), ("*.safetensors", lambda file: WeightFiles((file,)))):
        others = sorted(checkpoint.glob(pattern))
        if len(others) == 1:
            return read(others[0])
        if others:
            names = listed([file.name for file in others])
            are_shards = all(_SHARD.search(file.name) for file in others)
            advice = "they are shards, whose index is missing" if are_shards else "pass the one you mean"
            raise CheckpointNotFoundError(f"{checkpoint} holds several files {pattern} ({names}); {advice}")
    raise CheckpointNotFoundError(
        f"{checkpoint} should hold {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME}, one *.index.json or one *.safetensors, and "
        "holds none of them"
    )
