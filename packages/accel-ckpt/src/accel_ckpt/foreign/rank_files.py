"""Files in which every rank saved its own part under FSDP, as Accelerate writes them with ``use_dcp=False``.

A file, such as ``pytorch_model_fsdp_0_rank3.bin``, is a pickle of ``torch.save`` with the ``DTensor`` of one rank.
Their mesh and placements say what every other rank has saved. So the first file describes all of them, and another file
is opened when a box in it is wanted; it is mapped, so that of its tensors only the wanted bytes are read.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from accel_ckpt.divisions import Division, RankMesh, held_boxes, reading_of, splits_of
from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedValueError
from accel_ckpt.foreign.pickles import unpickle
from accel_ckpt.foreign.pieces import Piece, PiecedTensor
from accel_ckpt.format.layout import LaidOut
from accel_ckpt.format.reader import DAMAGE, cause_of, refuse_expanded
from accel_ckpt.format.saved_tensors import FileBox, FileChecks, SavedTensor
from accel_ckpt.format.tagged_json import show_path
from accel_ckpt.geometry import Box
from accel_ckpt.parts import is_sharded

__all__ = ["RANK_FILE", "RankFiles", "rank_files"]

RANK_FILE = re.compile(r"(?P<stem>(?:pytorch_model_fsdp|optimizer)_(?P<n>\d+))_rank(?P<rank>\d+)\.bin")
"""A file of one rank; those with the same stem hold one model or one optimizer."""

_Key: TypeAlias = tuple[Any, ...]
"""Where a tensor is in the nested content of a file."""


def rank_files(stem: Path) -> dict[int, Path]:
    """The files of a model or an optimizer by rank; empty if there are none.

    Args:
        stem: their path without ``_rank<rank>.bin``, such as ``checkpoint/optimizer_0``.
    """
    paths = stem.parent.iterdir() if stem.parent.is_dir() else ()
    matches = {path: RANK_FILE.fullmatch(path.name) for path in paths}
    return {
        int(match["rank"]): path for path, match in matches.items() if match and match["stem"] == stem.name
    }


class _OtherMeshError(UnsupportedValueError):
    """Ranks divide tensors in several ways."""


class RankFiles:
    """A model or an optimizer in the files of its ranks. Needs no process group; runs no code from the files.

    Args:
        stem: the path of the files without ``_rank<rank>.bin``.

    Raises:
        CheckpointNotFoundError: the file of a rank is missing.
        CorruptCheckpointError: a file is damaged, or of another save.
        UnsupportedValueError: its mesh is not that of the ranks that have files.
        UnsafeCheckpointError: reading a file would run code.
    """

    def __init__(self, stem: Path) -> None:
        self._stem, self._files = stem, rank_files(stem)
        if not self._files:
            raise CheckpointNotFoundError(f"there is no file {stem}_rank0.bin")
        self._held: dict[int, dict[_Key, torch.Tensor]] = {}
        first = min(self._files)
        content, found, self._steps = self._open(first)
        self._laid_out = {key: laid for key, (laid, _) in found.items()}
        self._held[first] = {key: local for key, (_, local) in found.items()}
        self.tree: dict[str, Any] = _changed(content, self._saved)
        """The content, with `SavedTensor` in the place of divided tensors. The rest is what the first rank saved."""

    def pieces(self) -> dict[str, PiecedTensor]:
        """The tensors of a model's state dict by name, in pieces that are read one by one."""
        return {
            name: self._pieced(name, value)
            for name, value in self.tree.items()
            if isinstance(value, SavedTensor | torch.Tensor)
        }

    def _pieced(self, name: str, value: SavedTensor | torch.Tensor) -> PiecedTensor:
        shape, source = tuple(value.shape), str(self._stem)
        whole = Box((0,) * len(shape), shape)
        if isinstance(value, torch.Tensor):
            pieces = [Piece(*whole, lambda: value)]
        else:
            pieces = [
                Piece(*box, partial(self._part, (name,), rank, number))
                for rank, number, box in self._laid_out[name,].boxes_in(whole)
            ]
        return PiecedTensor(name, shape, value.dtype, pieces, source)

    def _saved(self, key: _Key, tensor: torch.Tensor) -> SavedTensor:
        return SavedTensor(
            show_path(key), tensor.shape, tensor.dtype, partial(self._boxes_in, key), FileChecks()
        )

    def _boxes_in(self, key: _Key, wanted: Box) -> Iterator[FileBox]:
        for rank, number, box in self._laid_out[key].boxes_in(wanted):
            yield FileBox(box, self._files[rank], self._part(key, rank, number))

    def _part(self, key: _Key, rank: int, number: int) -> torch.Tensor:
        """One of the boxes that a rank has saved of a tensor: a view of its file."""
        if rank not in self._held:
            _, found, steps = self._open(rank)
            for name in sorted(found.keys() ^ self._laid_out.keys(), key=show_path):
                self._refuse(rank, f"only one of them has a part of {show_path(name)}")
            for name, (laid, _) in found.items():
                if laid != self._laid_out[name]:
                    self._refuse(
                        rank,
                        f"{show_path(name)} is {_words(laid)} there and {_words(self._laid_out[name])} here",
                    )
            if steps != self._steps:
                self._refuse(rank, "the optimizer had taken other steps")
            self._held[rank] = {name: local for name, (_, local) in found.items()}
        laid = self._laid_out[key]
        mesh, splits, reading, _ = laid.division
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None, "the mesh has all ranks that have files"
        where, _ = held_boxes(laid.shape, splits, mesh.shape, coordinate, reading)[number]
        return self._held[rank][key][where]

    def _refuse(self, rank: int, why: str) -> None:
        raise CorruptCheckpointError(
            f"{self._files[rank]} does not belong to {self._files[min(self._files)].name}: {why}. They are of "
            "different saves; restore all files of one save, or load another checkpoint"
        )

    def _open(self, rank: int) -> tuple[Any, dict[_Key, tuple[LaidOut, torch.Tensor]], dict[str, float]]:
        """The content of a file; what it says of each divided tensor, with the rank's part; and optimizers' steps."""
        path = self._files[rank]
        content = _unpickled(path)
        found: dict[_Key, tuple[LaidOut, torch.Tensor]] = {}
        meshes: dict[int, RankMesh] = {}  # a file has one object for all tensors

        def collect(key: _Key, tensor: Any) -> None:
            mesh = tensor.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = self._mesh(mesh, path)
            found[key] = _laid_out(tensor, meshes[id(mesh)], rank)
            refuse_expanded(show_path(key), found[key][1], str(path))

        try:
            _changed(content, collect)
            steps = {name: float(value) for name, value in _steps(content)}
        except (CorruptCheckpointError, CheckpointNotFoundError, _OtherMeshError):
            raise
        except (UnsupportedValueError, *DAMAGE) as error:
            raise CorruptCheckpointError(
                f"{path} does not hold what an FSDP rank saves: {cause_of(error)}"
            ) from error
        return content, found, steps

    def _mesh(self, mesh: Any, path: Path) -> RankMesh:
        ranks = vars(mesh).get("mesh")  # torch up to 2.9; later a property, which an old state does not have
        ranks = mesh.mesh if ranks is None else ranks
        count, files = ranks.numel(), self._files.keys()
        # A file may say any number: no more ranks are looked at than there are files.
        members = set(ranks.flatten().tolist()) if count <= len(files) else set(range(len(files) + 1))
        if members - files:
            raise CheckpointNotFoundError(
                f"{self._stem}_rank{min(members - files)}.bin is missing: {path.name} was saved by {count} ranks, and "
                f"there are the files of {len(files)}. Copy the files of all ranks to {path.parent}"
            )
        if files - members:
            raise _OtherMeshError(
                f"{path} was saved by a mesh of {count} ranks, and {self._files[min(files - members)].name} is not of "
                "one of them. Either files of another save are beside it, or FSDP was combined with tensor "
                "parallelism, where a tensor has a mesh of some ranks; such a state is read with use_dcp=True alone"
            )
        return RankMesh.of(ranks)


def _unpickled(path: Path) -> Any:
    import torch.distributed.tensor  # noqa: F401 - allows its classes where weights_only is set

    # It warns for each mesh that its process groups do not exist, which nothing here uses.
    log = logging.getLogger("torch.distributed.device_mesh")
    was, log.disabled = log.disabled, True
    try:
        content = unpickle(path, str(path), mapped=True)
    finally:
        log.disabled = was
    if not isinstance(content, Mapping):
        raise CorruptCheckpointError(f"{path} does not hold a state dict")
    return content


def _laid_out(tensor: Any, mesh: RankMesh, rank: int) -> tuple[LaidOut, torch.Tensor]:
    """How the ranks of a mesh divide a tensor, and this rank's part."""
    shape, local = tuple(tensor.shape), tensor.to_local().detach()
    splits, coordinate = splits_of(shape, tensor.placements), mesh.coordinate(rank)
    assert coordinate is not None, "the mesh has all ranks that have files"
    pieces = max((split[1] for split in splits if split is not None), default=1)
    if local.dtype != tensor.dtype or pieces > math.prod(mesh.shape):
        raise ValueError(f"{local.dtype} of a tensor of {tensor.dtype}, divided as {splits} by {mesh}")
    reading = reading_of(shape, splits, mesh.shape, coordinate, tuple(local.shape))
    return LaidOut(shape, tensor.dtype, Division(mesh, splits, reading), 0), local


def _changed(node: Any, change: Callable[[_Key, Any], Any], key: _Key = ()) -> Any:
    """A copy of nested data with something else in the place of each ``DTensor``."""
    if isinstance(node, Mapping):
        return {name: _changed(value, change, (*key, name)) for name, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_changed(value, change, (*key, at)) for at, value in enumerate(node))
    return change(key, node) if is_sharded(node) else node


def _steps(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The steps that an optimizer has taken with each parameter; all ranks have taken the same."""
    states = content.get("state")
    for name, state in states.items() if isinstance(states, Mapping) else ():
        if isinstance(state, Mapping) and "step" in state and not is_sharded(state["step"]):
            yield name, state["step"]


def _words(laid: LaidOut) -> str:
    return f"{list(laid.shape)} of {laid.dtype} on a mesh {laid.division.mesh.shape}, divided as {laid.division.splits}"
