"""Saving a divided model as files of whole tensors, which are gathered one after the other."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.coordination.ranks import Coordinator, default_coordinator, run_together
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointSaveError, UnsupportedValueError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.format.reader import is_extra_state
from accel_ckpt.format.writer import FileRecord, check_writable, lay_out, write_safetensors_from, write_torch
from accel_ckpt.modules.versions import versions_metadata, versions_of, with_versions
from accel_ckpt.parts import Leaf, Part, gathered, is_divided, is_leaf, parts_of, shape_of
from accel_ckpt.saving.part_division import tied_parts
from accel_ckpt.saving.plan import PlannedTensor, convert_file_size_to_int, plan_shards, shard_file_names
from accel_ckpt.saving.save_model import check_extra, index_of, named_index, no_weight

__all__ = ["gather_whole", "save_gathered_model"]


def gather_whole(leaf: Leaf, coordinator: Coordinator | None = None) -> torch.Tensor:
    """Gather a tensor of which every rank holds parts, in host memory. Collective.

    Args:
        leaf: this rank's part; a plain tensor comes back as it is.
        coordinator: the ranks; by default all.

    Raises:
        UnsupportedValueError: the parts of all ranks together do not cover the whole tensor.
    """
    if not is_divided(leaf):
        assert isinstance(leaf, torch.Tensor), "what is not divided is a tensor"
        return leaf
    if isinstance(leaf, torch.Tensor):
        return gathered(leaf).cpu()
    ranks = coordinator or default_coordinator()
    # Copies, because a view is pickled with all of the memory that it looks at, such as a flat partition.
    mine = [(part.offsets, part.tensor.detach().to("cpu", copy=True)) for part in parts_of(leaf)]
    shape = shape_of(leaf)
    result = torch.empty(shape, dtype=_dtype_of(leaf))
    filled = torch.zeros(shape, dtype=torch.bool)
    for parts in ranks.exchange(mine):
        for offsets, values in parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            result[box] = values
            filled[box] = True
    if not bool(filled.all()):
        raise UnsupportedValueError(
            f"the parts that all ranks hold of a tensor of shape {list(shape)} leave {int((~filled).sum())} elements "
            "out; every element must be in some rank's part"
        )
    return result


def save_gathered_model(
    model: Mapping[str, Leaf],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    each_node: bool = False,
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> tuple[str, ...]:
    """Save the weights of a model whose tensors are divided among ranks, in the files of `save_model`. Collective.

    Tensors are gathered one after the other, so a rank holds one whole tensor at a time; files of `torch.save` are
    gathered file by file.

    Args:
        model: this rank's parts, by canonical name; the same names on every rank.
        save_directory: the folder; created if it does not exist.
        max_shard_size: bytes per file, or a size such as ``"5GB"``.
        safe_serialization: write safetensors, else files of ``torch.save``.
        each_node: the first rank of every node writes, not only rank 0.
        coordinator: the ranks; by default all.
        disk: the file system to write to.

    Returns:
        The names of the files written, the index included; the same on every rank.

    Raises:
        CheckpointSaveError: see `save_model`; or another rank failed.
        UnsupportedValueError: the format cannot hold a tensor, or a value is not a tensor.
    """
    ranks = coordinator or default_coordinator()
    folder = find_folder(save_directory)
    limit = convert_file_size_to_int(max_shard_size)
    writes = ranks.local_rank == 0 if each_node else ranks.rank == 0

    extra = {name: value for name, value in model.items() if not is_leaf(value)}
    leaves = {name: leaf for name, leaf in model.items() if name not in extra}

    def inspect() -> dict[str, str]:
        for name, leaf in extra.items():
            if not is_extra_state(name):
                raise no_weight(name, leaf)
        check_extra(extra, safe_serialization)
        for name, leaf in leaves.items():
            if safe_serialization:
                check_writable(name, torch.empty(0, dtype=_dtype_of(leaf)))
        if writes:
            folder.check_for_weights()
        return tied_parts({name: parts_of(leaf) for name, leaf in leaves.items()})

    doing = f"saving the model to {folder.path}"
    ties: dict[str, str] = {}
    for answer in run_together(inspect, ranks, doing=doing, error=CheckpointSaveError):
        ties.update(answer)
    files, index = _plan(with_versions(leaves, versions_of(model)), ties, limit, safe_serialization, extra)
    gathering = _Gathering(leaves, ranks, [name for file in files for name in file.order])

    def work() -> tuple[str, ...]:
        try:
            if not writes:
                return ()
            writers = {file.name: partial(file.write, gathering.take) for file in files}
            return folder.publish_weights(writers, named_index(index, safe_serialization), disk)
        finally:
            gathering.finish()  # whatever happened here: the other ranks wait for this one's parts

    return run_together(work, ranks, doing=doing, error=CheckpointSaveError)[0]


@dataclass(frozen=True, slots=True)
class _GatheredFile:
    """A file of whole tensors that do not exist yet.

    Args:
        name: of the file.
        about: shape and dtype by name.
        ties: other names of these tensors.
        safe: safetensors, or else `torch.save`.
        extra: what a file of `torch.save` holds besides tensors.
        versions: of the state dicts of modules.
    """

    name: str
    about: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ties: Mapping[str, str]
    safe: bool
    extra: Mapping[str, Any]
    versions: Mapping[str, int]

    @property
    def metadata(self) -> dict[str, str]:
        return {"format": "pt", **versions_metadata(self.versions), **self.ties}

    @property
    def order(self) -> list[str]:
        """Names in the order in which their values are written."""
        return list(lay_out(self.about, self.metadata).entries) if self.safe else list(self.about)

    def write(self, take: Callable[[str], torch.Tensor], path: Path, disk: Disk) -> FileRecord:
        """Write it; `take` is asked for every tensor once, in order."""
        if self.safe:
            return write_safetensors_from(path, self.about, lambda name: (take(name),), self.metadata, disk)
        whole = {name: take(name) for name in self.order}
        tied = {alias: whole[name] for alias, name in self.ties.items()}
        return write_torch(path, with_versions({**whole, **tied, **self.extra}, self.versions), disk)


class _Gathering:
    """Gathers tensors in an order that all ranks keep.

    Args:
        model: what this rank holds.
        ranks: those that hold parts.
        names: the order.
    """

    def __init__(self, model: Mapping[str, Leaf], ranks: Coordinator, names: Iterable[str]) -> None:
        self._model = model
        self._ranks = ranks
        self._left = deque(names)

    def take(self, name: str) -> torch.Tensor:
        """The next tensor, which must be the one of this name."""
        following = self._left.popleft()
        assert following == name, "all ranks gather in one order"
        return gather_whole(self._model[name], self._ranks)

    def finish(self) -> None:
        """Take part in what is left."""
        while self._left:
            self.take(self._left[0])


def _plan(
    model: Mapping[str, Leaf], ties: Mapping[str, str], limit: int, safe: bool, extra: Mapping[str, Any]
) -> tuple[list[_GatheredFile], str | None]:
    """The files, and the text of the index if there are several."""
    about = {name: (shape_of(leaf), _dtype_of(leaf)) for name, leaf in model.items() if name not in ties}
    shards = plan_shards(
        [PlannedTensor(name, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in about.items()],
        limit,
    )
    stem, extension = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = shard_file_names(len(shards), stem, extension)
    files: list[_GatheredFile] = []
    for file, shard in zip(names, shards, strict=True):
        own = {alias: name for alias, name in ties.items() if name in shard.names}
        first = {} if files else extra
        here = {name: about[name] for name in shard.names}
        files.append(_GatheredFile(file, here, own, safe, first, versions_of(model)))
    return files, index_of(names, shards, extra)


def _dtype_of(leaf: Leaf) -> torch.dtype:
    first = leaf[0] if isinstance(leaf, (list, tuple)) else leaf
    tensor = first.tensor if isinstance(first, Part) else first
    assert isinstance(tensor, torch.Tensor), "a leaf is a tensor, a part or parts"
    return tensor.dtype
