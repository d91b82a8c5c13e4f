"""Device memory that is reused by one group of weights after another."""

from __future__ import annotations

from accel_bigmodel.streaming.slot_layout import ALIGNMENT, aligned
from accel_bigmodel.streaming.types import Slot, Transfer

__all__ = ["SlotPool"]


class SlotPool:
    """Reusable slots whose total size never exceeds a limit.

    Args:
        transfer: allocates them.
        limit: bytes.
        resident: other bytes on the device; only counted in ``peak``.
    """

    def __init__(self, transfer: Transfer, limit: int, resident: int = 0) -> None:
        self._transfer = transfer
        self._limit = limit
        self._resident = resident
        self._free: list[Slot] = []
        self.nbytes = 0
        self.peak = resident

    def take(self, nbytes: int, *, beyond: bool = False) -> Slot | None:
        """A slot of at least this size, or ``None`` if the slots in use leave no room for one.

        Args:
            nbytes: bytes needed.
            beyond: exceed the limit if necessary.
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
        """Return a slot for the next group. Copies to it may still run; the next copy runs after them."""
        self._free.append(slot)

    def fresh(self) -> SlotPool:
        """An empty pool that replaces this one and its slots."""
        new = SlotPool(self._transfer, self._limit, self._resident)
        new.peak = self.peak
        return new

    def clear(self) -> None:
        """Free the slots that are not in use."""
        while self._free:
            self._discard(self._free[0])

    def _allocate(self, nbytes: int) -> Slot:
        slot = Slot(self._transfer.allocate(nbytes), self._transfer.mark(None))
        self.nbytes += nbytes
        self.peak = max(self.peak, self._resident + self.nbytes)
        return slot

    def _discard(self, slot: Slot) -> None:
        if slot.last_copy is not None:
            slot.last_copy.settle()  # otherwise the allocator could reuse the memory while it is written
        self._free.remove(slot)
        self.nbytes -= slot.buffer.nbytes
