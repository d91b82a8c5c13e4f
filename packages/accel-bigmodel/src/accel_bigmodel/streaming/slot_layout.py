"""The layout of a group's tensors in a slot: offsets, shapes and strides. No device memory is touched here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT", "SlotLayout", "address_of", "aligned"]

# Bytes; the alignment of device allocators.
ALIGNMENT = 512


def aligned(nbytes: int) -> int:
    """Bytes that a tensor takes including the padding that aligns the next one."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; ``None`` for tensors without storage, such as sparse and wrapper tensors."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return None


@dataclass(frozen=True)
class _Piece:
    shape: torch.Size
    stride: tuple[int, ...]
    """Dense, even where the tensor's own stride is not."""
    dtype: torch.dtype
    inference: bool
    tensor_stride: tuple[int, ...]
    begin: int
    nbytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        # Inference tensor or not as the original, whatever the current mode: a parameter cannot change between the two.
        with torch.inference_mode(self.inference):
            bare = torch.empty(0, dtype=self.dtype, device=buffer.device)
            return bare.set_(
                buffer.untyped_storage(), self.begin // self.dtype.itemsize, self.shape, self.stride
            )


class SlotLayout:
    """Offsets of a group's tensors in one piece of memory. Dense tensors keep their memory format.

    Args:
        tensors: on any device; only their shapes, strides and dtypes are used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.pieces: list[_Piece] = []
        self.nbytes = 0
        for tensor in tensors:
            stride = torch.empty_like(tensor, device="meta").stride()
            kind = tensor.shape, stride, tensor.dtype, tensor.is_inference(), tensor.stride()
            self.pieces.append(_Piece(*kind, self.nbytes, tensor.nbytes))
            self.nbytes += aligned(tensor.nbytes)
        self._begins = [piece.begin for piece in self.pieces]

    def describes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors still have the shapes, strides and dtypes that the layout was made for.

        Strides count because kernels round differently for another memory format.
        """
        for tensor, piece in zip(tensors, self.pieces, strict=True):
            if (
                tensor.shape != piece.shape
                or tensor.dtype is not piece.dtype
                or tensor.is_inference() is not piece.inference
                or tensor.stride() != piece.tensor_stride
            ):
                return False
        return True

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, as views of a buffer (1-D uint8)."""
        return [piece.view(buffer) for piece in self.pieces]

    def piece_at(self, begin: int) -> int:
        """Number of the tensor that contains a byte."""
        # Empty tensors begin where the next one does; only the last of those that begin there has bytes.
        return bisect_right(self._begins, begin) - 1
