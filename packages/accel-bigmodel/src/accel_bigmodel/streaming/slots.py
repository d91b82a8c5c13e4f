"""Device memory that is reused by one group of weights after another."""

from __future__ import annotations

from accel_bigmodel.streaming.slot_layout import ALIGNMENT, aligned
from accel_bigmodel.streaming.types import Slot, Transfer

__all__ = ["SlotPool"]


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
        nbytes = max(ALIGNMENT, aligned(nbytes))
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
