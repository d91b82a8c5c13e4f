"""Types that the streaming engine shares: slots of device memory, and ``Transfer``, the interface to the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from accel_bigmodel.streaming.host_blocks import HostBlocks
from accel_bigmodel.streaming.slot_layout import SlotLayout, address_of

__all__ = ["PendingCopy", "Slot", "Sources", "Transfer"]

Sources = Sequence["torch.Tensor | None"]
"""The tensors of a group in host memory, in the order of its layout; ``None`` is not copied."""


class PendingCopy(Protocol):
    """A copy that was requested."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> None:
        """Make later computation of this thread see the copied values; raise the error of a failed copy."""

    def settle(self) -> None:
        """Wait like ``wait``, but ignore whether the copy failed."""

    def cancel(self) -> None:
        """Skip the copy if it has not begun; it is no longer needed."""


class Slot:
    """A piece of memory on the device."""

    __slots__ = ("_views", "address", "buffer", "last_copy", "used_until")

    def __init__(self, buffer: torch.Tensor, used_until: Any) -> None:
        self.buffer = buffer
        self.address = address_of(buffer)
        # The slot may be written after this point of the device's computation; see Transfer.mark.
        self.used_until = used_until
        self.last_copy: PendingCopy | None = None
        self._views: dict[SlotLayout, list[torch.Tensor]] = {}

    def views(self, layout: SlotLayout) -> list[torch.Tensor]:
        """The tensors of a layout in this slot; made once per layout."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.views(self.buffer)
        return found


class Transfer(Protocol):
    """Memory of a device, and one queue of copies to it.

    Copies run one after another in the order of the requests, concurrently with the computation. ``copy.deepcopy``
    makes an independent one for the same device.
    """

    device: torch.device

    host_blocks: HostBlocks
    """The blocks made by ``host_block``; sources in them are copied without being packed first."""

    def host_block(self, nbytes: int) -> memoryview:
        """New host memory of the kind that the device copies from fastest.

        Raises:
            RuntimeError: none is left; copies from other memory still work.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory on the device, as 1-D uint8."""

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> PendingCopy:
        """Request a copy of a group's tensors to a slot, after the computation passed ``slot.used_until``.

        Args:
            name: of the group.
            sources: tensors in host memory, in the order of the layout; ``None`` is not copied.
            layout: where they go in the slot.
            slot: the target.
        """

    def mark(self, previous: Any) -> Any:
        """The end of the computation queued so far; ``previous`` is a mark to reuse."""

    def seconds(self) -> float:
        """Seconds that finished copies took."""

    def close(self) -> None:
        """Wait for requested copies, and free threads and buffers. A later copy makes them again."""
