"""Memory on the device that one group of weights after the other uses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_bigmodel.streaming.transfer import Pending, Transfer

__all__ = ["Layout", "Slot", "SlotPool", "address_of", "aligned"]

# Bytes; as the allocators of devices align what they give.
_ALIGNMENT = 512


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of so many takes with what aligns the next one."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins; ``None`` for tensors without their own, as sparse and wrapping ones."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return None


@dataclass(frozen=True)
class _Piece:
    shape: torch.Size
    stride: tuple[int, ...]
    """Here: dense, also where the tensor's is not."""
    dtype: torch.dtype
    inference: bool
    tensor_stride: tuple[int, ...]
    begin: int
    nbytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        # As the tensor was made, whatever mode this runs in: a parameter cannot change between the two kinds.
        with torch.inference_mode(self.inference):
            bare = torch.empty(0, dtype=self.dtype, device=buffer.device)
            return bare.set_(
                buffer.untyped_storage(), self.begin // self.dtype.itemsize, self.shape, self.stride
            )


class Layout:
    """Where in one piece of memory each tensor of a group lies. Dense tensors keep their memory format.

    Args:
        tensors: on any device; only their shapes, strides and dtypes are looked at.
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
        """Whether the tensors still are of the shapes, strides, dtypes and kind that the layout was made for.

        Strides count because kernels round otherwise for another memory format.
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
        """Number of the tensor in which a byte lies."""
        # Tensors without bytes begin where the next one does; the last of those that begin there has bytes.
        return bisect_right(self._begins, begin) - 1


class Slot:
    """A piece of memory on the device."""

    __slots__ = ("_views", "address", "buffer", "last_copy", "used_until")

    def __init__(self, buffer: torch.Tensor, used_until: Any) -> None:
        self.buffer = buffer
        self.address = address_of(buffer)
        # Point of the device's computation before which nothing may be written; see Transfer.mark.
        self.used_until = used_until
        self.last_copy: Pending | None = None
        self._views: dict[Layout, list[torch.Tensor]] = {}

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """The tensors of a layout in this slot; made once."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.views(self.buffer)
        return found


class SlotPool:
    """Slots, used again for whatever fits, whose bytes together never exceed a limit.

    Args:
        transfer: allocates them.
        limit: bytes.
        resident: bytes on the device that others hold; only counted in ``peak``.
    """

    def __init__(self, transfer: Transfer, limit: int, resident: int = 0) -> None:
        self._transfer = transfer
        self._limit = limit
        self._resident = resident
        self._free: list[Slot] = []
        self.nbytes = 0
        self.peak = resident

    def take(self, nbytes: int, *, beyond: bool = False) -> Slot | None:
        """A slot of at least so many bytes, or ``None`` if what others use leaves no room for one.

        Args:
            nbytes: bytes that it needs.
            beyond: the limit may be exceeded if it must.
        """
        nbytes = max(_ALIGNMENT, aligned(nbytes))
        fitting = min(
            (slot for slot in self._free if slot.buffer.nbytes >= nbytes),
            key=lambda slot: slot.buffer.nbytes,
            default=None,
        )
        room = self._limit - self.nbytes
        if fitting is not None and (fitting.buffer.nbytes <= 2 * nbytes or nbytes > room):
            self._free.remove(fitting)
            return fitting
        if nbytes > room + sum(slot.buffer.nbytes for slot in self._free) and not beyond:
            return None
        while self._free and nbytes > self._limit - self.nbytes:
            self._discard(self._free[0])  # unused for longest
        return self._allocate(nbytes)

    def give_back(self, slot: Slot) -> None:
        """Let the next group have a slot. What copies were begun to it may still run: the next one follows them."""
        self._free.append(slot)

    def fresh(self) -> SlotPool:
        """An empty pool in place of this one, whose slots are forgotten."""
        new = SlotPool(self._transfer, self._limit, self._resident)
        new.peak = self.peak
        return new

    def clear(self) -> None:
        """Free what is not in use."""
        while self._free:
            self._discard(self._free[0])

    def _allocate(self, nbytes: int) -> Slot:
        slot = Slot(self._transfer.allocate(nbytes), self._transfer.mark(None))
        self.nbytes += nbytes
        self.peak = max(self.peak, self._resident + self.nbytes)
        return slot

    def _discard(self, slot: Slot) -> None:
        if slot.last_copy is not None:
            slot.last_copy.settle()  # else the memory would go to others while it is written
        self._free.remove(slot)
        self.nbytes -= slot.buffer.nbytes
