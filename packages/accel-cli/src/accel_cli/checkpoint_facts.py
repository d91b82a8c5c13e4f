"""What checkpoints hold and how two of them differ, for ``accel checkpoint``; no code of a file runs.

Places are local folders or URIs of object storage, of which only manifests, descriptions and headers are fetched until
values are compared.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import accel_ckpt
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.folder import Folder
from accel_ckpt.folders.objects.store import in_parallel
from accel_ckpt.format.manifest import FORMAT
from accel_state.errors import ConfigError

__all__ = [
    "PREFIXES",
    "LeafDifference",
    "Listed",
    "checkpoints_below",
    "differences",
    "facts",
    "folder_of",
    "opened",
    "tensors_of",
]

PREFIXES = ("checkpoint_", "step_")
"""How `Accelerator.save_state` and `Checkpointer` number their folders."""
_NUMBERED = re.compile(r"(.*?)(\d+)")
_DEPTH = 3  # levels of names that are looked at: a folder of runs, a run, its folder of checkpoints
_CHUNK = 1 << 24  # elements that are compared at a time


class Listed(NamedTuple):
    """A checkpoint below a folder, or what a save that did not finish left there.

    Attributes:
        name: its path below the folder.
        state: ``complete``, or what else it is.
        step: steps of the training, as far as the checkpoint or its name says it.
        ranks: number of ranks that saved.
        strategy: name of the strategy; None: no `Accelerator` of this version saved it.
        size: bytes of all files.
        saved: when it became complete, in seconds since the epoch.
    """

    name: str
    state: str
    step: int | None = None
    ranks: int | None = None
    strategy: str | None = None
    size: int | None = None
    saved: float | None = None


class LeafDifference(NamedTuple):
    """What differs between two checkpoints.

    Attributes:
        name: of a tensor or a value; the part of the checkpoint is in front of it.
        first: the tensor or value of the first checkpoint, in words; None: it has none.
        second: that of the second one.
        largest: the largest absolute difference between two elements of a tensor.
    """

    name: str
    first: str | None
    second: str | None
    largest: float | None = None


def _location(place: str) -> Path:
    try:
        return accel_ckpt.location(place)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def folder_of(place: str) -> Folder:
    """The folder of checkpoints at a path or URI.

    Raises:
        ConfigError: there is none.
    """
    folder = find_folder(_location(place))
    if folder.on_this_machine and not folder.path.is_dir():
        what = "is a file" if folder.path.exists() else "does not exist"
        raise ConfigError(f"{folder.path} {what}; give the folder that holds checkpoints")
    return folder


def checkpoints_below(folder: Folder) -> list[Listed]:
    """The checkpoints in a folder and up to two folders below, the newest last: by number, the others by time."""

    def age(one: Listed) -> tuple[str, float]:
        numbered = _NUMBERED.fullmatch(one.name)
        return (numbered[1], int(numbered[2])) if numbered else ("", one.saved or 0)

    return sorted(_listed(folder, "", _DEPTH), key=age)


def _listed(folder: Folder, above: str, depth: int) -> Iterator[Listed]:
    for name, ended in folder.unfinished().items():
        yield Listed(above + name, "left by an interrupted save" if ended else "being saved")
    names = [name for name in folder.names() if not name.startswith(".")]
    below = [find_folder(folder.path / name) for name in names]
    for name, child, listed in zip(names, below, in_parallel(_described, below), strict=True):
        if listed is not None:
            yield listed._replace(name=above + name)
        elif depth > 1:
            yield from _listed(child, f"{above}{name}/", depth - 1)


def _described(folder: Folder) -> Listed | None:
    """A checkpoint; None if the folder is none."""
    name = folder.path.name
    try:
        if folder.has_manifest():
            return _complete(folder, accel_ckpt.open_training_state(folder.path))
        if accel_ckpt.is_accelerate_checkpoint(folder.path):
            return Listed(name, "of Accelerate")
        begun = name.startswith(PREFIXES) and _NUMBERED.fullmatch(name) and folder.names()
        return Listed(name, "incomplete") if begun else None
    except (accel_ckpt.CorruptCheckpointError, accel_ckpt.UnsafeCheckpointError) as error:
        return Listed(name, f"damaged: {error}")
    except (accel_ckpt.CheckpointError, OSError) as error:
        return Listed(name, f"cannot be read: {error}")


def _complete(folder: Folder, checkpoint: accel_ckpt.TrainingCheckpoint) -> Listed:
    name, manifest = folder.path.name, checkpoint.manifest
    known = checkpoint.lazy_trees(names=("step", "progress"))
    size = sum(file.size for file in manifest.files.values())
    strategy = _progress(known).get("strategy")
    return Listed(
        name, "complete", _step(known, name), manifest.world_size, strategy, size, folder.modified()
    )


def _step(trees: Mapping[str, Any], name: str) -> int | None:
    """The number that an `Accelerator` saved, or that a `Checkpointer` put into the name."""
    step = trees.get("step")
    if isinstance(step, int):
        return step
    numbered = _NUMBERED.fullmatch(name)
    return int(numbered[2]) if numbered and numbered[1] == "step_" else None


def _progress(trees: Mapping[str, Any]) -> Mapping[str, Any]:
    found = trees.get("progress")
    return found if isinstance(found, Mapping) else {}


def opened(place: str) -> accel_ckpt.TrainingCheckpoint:
    """The checkpoint at a path or URI.

    Raises:
        ConfigError: it is one of Accelerate; the message has the parts that it holds.
        CheckpointError: there is no complete checkpoint of this library.
    """
    path = _location(place)
    if accel_ckpt.is_accelerate_checkpoint(path):
        foreign = accel_ckpt.AccelerateCheckpoint(path)
        parts = foreign.parts() | {"loaders": len(foreign.loaders), "random states": len(foreign.ranks)}
        raise ConfigError(
            f"{path} is a checkpoint of Accelerate ({foreign.kind}) with "
            f"{', '.join(f'{what}: {count}' for what, count in parts.items() if count)}; load_state() reads it, and "
            "save_state() then writes one of this library"
        )
    return accel_ckpt.open_training_state(path)


def facts(checkpoint: accel_ckpt.TrainingCheckpoint) -> dict[str, Any]:
    """What a checkpoint holds, as plain data."""
    manifest, shared = checkpoint.manifest, _parts(checkpoint)
    progress = _progress(shared)
    ranks = [_parts(checkpoint, rank) for rank in manifest.ranks]
    random = [trees["rng"] for trees in ranks if isinstance(trees.get("rng"), Mapping)]
    optimizers = [tree for name, tree in shared.items() if name.startswith("optimizer_")]
    sizes = {name: file.size for name, file in manifest.files.items()}
    return {
        "format": f"{FORMAT} {manifest.version}",
        "step": _step(shared, checkpoint.directory.name),
        "world size": manifest.world_size,
        "ranks": list(manifest.ranks),
        "strategy": progress.get("strategy"),
        "precision": progress.get("precision"),
        "models": progress.get("models") or shared.get("modules") or len(manifest.models),
        "optimizers": [tree.get("class") for tree in optimizers if isinstance(tree, Mapping)],
        "schedulers": progress.get("schedulers"),
        "loaders": progress.get("loaders"),
        "registered objects": progress.get("registered"),
        "random states": sorted({str(kind) for states in random for kind in states}),
        "shared parts": sorted(shared),
        "parts of each rank": sorted({name for trees in ranks for name in trees}),
        "tensors": len(tensors_of(checkpoint)),
        "size": sum(sizes.values()),
        "saved": find_folder(checkpoint.directory).modified(),
        "files": sizes,
    }


def tensors_of(checkpoint: accel_ckpt.TrainingCheckpoint) -> dict[str, str]:
    """Dtypes and shapes of all tensors, by the names of ``differences``; only headers are read."""
    leaves = _leaves(checkpoint)
    return {name: _words(leaf) for name, leaf in leaves if isinstance(leaf, accel_ckpt.SavedTensor)}


def differences(
    first: accel_ckpt.TrainingCheckpoint, second: accel_ckpt.TrainingCheckpoint
) -> Iterator[LeafDifference]:
    """What differs, by name. How the content is divided into files is not compared.

    Raises:
        CorruptCheckpointError: a file was damaged or changed after the save.
    """
    one, other = dict(_leaves(first)), dict(_leaves(second))
    for name in sorted({*one, *other}):
        a, b = (_words(leaves[name]) if name in leaves else None for leaves in (one, other))
        if a != b:
            yield LeafDifference(name, a, b)
        elif isinstance(one[name], accel_ckpt.SavedTensor):
            largest = _largest_difference(one[name].read(), other[name].read())
            if largest is not None:
                yield LeafDifference(name, a, b, largest)


def _leaves(checkpoint: accel_ckpt.TrainingCheckpoint) -> Iterator[tuple[str, Any]]:
    manifest = checkpoint.manifest
    yield "world size", manifest.world_size
    for index in range(len(manifest.models)):
        for name, saved in checkpoint.weights(index).tensors.items():
            yield f"model {index}: {name}", saved
    yield from _below(_parts(checkpoint), "")
    for rank in manifest.ranks:
        yield from _below(_parts(checkpoint, rank), f"rank {rank}: ")


def _parts(checkpoint: accel_ckpt.TrainingCheckpoint, rank: int | None = None) -> dict[str, Any]:
    """The shared trees or those of a rank, and the values that a `Checkpointer` keeps in a tree with the name "."."""
    trees = dict(checkpoint.lazy_trees(rank))
    own = trees.pop(".", None)
    if not isinstance(own, Mapping):
        return trees
    values = own.get("values")
    return trees | (values if isinstance(values, dict) else {}) | {"modules": own.get("modules") or []}


def _below(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by their paths; empty dictionaries and lists are leaves."""
    if not isinstance(tree, Mapping | list | tuple | deque) or not tree:
        yield path.removesuffix("."), tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from _below(value, f"{path}{key}.")


def _words(leaf: Any) -> str:
    if isinstance(leaf, accel_ckpt.SavedTensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    if isinstance(leaf, np.ndarray):  # whose repr leaves elements out
        return f"{leaf.dtype} {leaf.tolist()}"
    if isinstance(leaf, set | frozenset):
        return f"{type(leaf).__name__} {sorted(map(repr, leaf))}"
    return repr(leaf)


def _largest_difference(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The largest absolute difference between elements; NaN if only one is NaN; None if all are equal."""
    kind = torch.complex128 if first.is_complex() else torch.float64
    kind = kind if first.is_complex() or first.is_floating_point() else torch.int64
    found: list[torch.Tensor] = []
    chunks = (torch.split(tensor.to_dense().flatten(), _CHUNK) for tensor in (first, second))
    for one, other in zip(*chunks, strict=True):
        a, b = one.to(kind), other.to(kind)
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        if unequal.any():
            found.append((a[unequal] - b[unequal]).abs().max().double())
    return torch.stack(found).max().item() if found else None
