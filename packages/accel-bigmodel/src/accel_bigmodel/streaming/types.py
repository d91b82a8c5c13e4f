"""What the parts of the streaming engine share: slots of device memory, and the seam to the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from accel_bigmodel.streaming.host_blocks import HostBlocks
from accel_bigmodel.streaming.slot_layout import SlotLayout, address_of

__all__ = ["Pending", "Slot", "Sources", "Transfer"]

Sources = Sequence["torch.Tensor | None"]
"""The tensors of a group in host memory, in the order of its layout; ``None`` is not copied."""


class Pending(Protocol):
    """A copy that was asked for."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> None:
        """Let what this thread computes from now on see the copied values; raise what the copy failed with."""

    def settle(self) -> None:
        """As ``wait``, but whether the copy failed does not matter any more."""

    def cancel(self) -> None:
        """Leave the copy out if it has not begun; nobody needs it."""


class Slot:
    """A piece of memory on the device."""

    __slots__ = ("_views", "address", "buffer", "last_copy", "used_until")

    def __init__(self, buffer: torch.Tensor, used_until: Any) -> None:
        self.buffer = buffer
        self.address = address_of(buffer)
        # Point of the device's computation before which nothing may be written; see Transfer.mark.
        self.used_until = used_until
        self.last_copy: Pending | None = None
        self._views: dict[SlotLayout, list[torch.Tensor]] = {}

    def views(self, layout: SlotLayout) -> list[torch.Tensor]:
        """The tensors of a layout in this slot; made once."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.views(self.buffer)
        return found


class Transfer(Protocol):
    """Memory of a device, and one queue of copies to it.

    Copies run one after the other, in the order in which they were asked for, beside the computation.
    ``copy.deepcopy`` makes an independent one for the same device.
    """

    device: torch.device

    host_blocks: HostBlocks
    """Where sources may lie, that came from ``host_block``: these are copied without being packed."""

    def host_block(self, nbytes: int) -> memoryview:
        """New host memory from which the device copies fastest.

        Raises:
            RuntimeError: there is none; copies from other memory work.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory on the device, as 1-D uint8."""

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> Pending:
        """Ask for a copy of a group's tensors to a slot, after the computation passed ``slot.used_until``.

        Args:
            name: of the group.
            sources: tensors in host memory, in the order of the layout; ``None`` is left out.
            layout: where they go in the slot.
            slot: the target.
        """

    def mark(self, previous: Any) -> Any:
        """The point that the computation has been asked to reach so far; ``previous`` is one to use again."""

    def seconds(self) -> float:
        """Seconds that finished copies took."""

    def close(self) -> None:
        """Wait for what was asked for, and free threads and buffers. A later copy takes them again."""
