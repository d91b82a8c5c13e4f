"""Tensors saved in pieces: where each piece belongs, and reading one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.reader import refuse_expanded
from accel_ckpt.geometry import Box, overlap

__all__ = ["Piece", "PiecedTensor", "PiecedWeights"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: its corner, its extent, and how to read it (to the CPU)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class PiecedTensor:
    """A tensor whose values are in one or several files.

    Args:
        name: for messages.
        shape: of the whole.
        dtype: of the whole.
        pieces: boxes that fill it exactly.
        source: where it is, for messages.

    Raises:
        CorruptCheckpointError: the pieces leave a gap, overlap, or reach outside.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece], source: str
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.pieces = sorted(pieces, key=lambda piece: piece.offsets)
        self.source = source
        self._check()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """The tensor, on the CPU. Needs its own size, and that of one piece if there are several."""
        if len(self.pieces) == 1:
            return self._read(self.pieces[0])
        result: torch.Tensor | None = None
        for piece in self.pieces:
            value = self._read(piece)  # the first says whether the others are worth so much memory
            if result is None:
                result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            result[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))] = value
        return torch.empty(self.shape, dtype=self.dtype, device="cpu") if result is None else result

    def runs(self) -> Iterator[torch.Tensor]:
        """Tensors whose values in order are those of the tensor; piece by piece where it is cut by rows."""
        by_rows = all(piece.sizes[1:] == tuple(self.shape[1:]) for piece in self.pieces)
        if by_rows:
            yield from map(self._read, self.pieces)
        else:
            yield self.whole()

    def _read(self, piece: Piece) -> torch.Tensor:
        value = piece.read()
        if tuple(value.shape) != piece.sizes or value.dtype != self.dtype:
            raise CorruptCheckpointError(
                f"{self.source} describes a piece of {self.name!r} as {list(piece.sizes)} of {self.dtype}, but it "
                f"is {list(value.shape)} of {value.dtype}"
            )
        refuse_expanded(self.name, value, self.source)
        return value

    def _check(self) -> None:
        rank = len(self.shape)
        inside = all(
            len(piece.offsets) == len(piece.sizes) == rank
            and all(
                0 <= o <= o + s <= n for o, s, n in zip(piece.offsets, piece.sizes, self.shape, strict=True)
            )
            for piece in self.pieces
        )
        boxes = [Box(piece.offsets, piece.sizes) for piece in self.pieces]
        volume = sum(math.prod(piece.sizes) for piece in self.pieces)
        if not inside or volume != math.prod(self.shape) or overlap(boxes):
            raise CorruptCheckpointError(
                f"{self.source} does not hold the whole tensor {self.name!r}: its {len(self.pieces)} pieces do not "
                f"fill {list(self.shape)} exactly; a file of another rank may be missing"
            )


class PiecedWeights:
    """The tensors of a checkpoint by name.

    Args:
        tensors: by name.
        aliases: names that were left out because they are tied → the name that is there.
        versions: name of a module → in which version it saved its state dict, where that is known.
    """

    def __init__(
        self,
        tensors: Mapping[str, PiecedTensor],
        aliases: Mapping[str, str] | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        self.tensors = tensors
        self.versions = versions or {}
        self.aliases = {alias: name for alias, name in (aliases or {}).items() if name in tensors}

    @property
    def about(self) -> Mapping[str, PiecedTensor]:
        """Shape and dtype of every tensor, under every name."""
        return {**self.tensors, **{alias: self.tensors[name] for alias, name in self.aliases.items()}}

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU."""
        return self.tensors[self.aliases.get(name, name)].whole()
