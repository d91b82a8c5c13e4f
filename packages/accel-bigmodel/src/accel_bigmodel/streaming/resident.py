"""Groups that stay on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from accel_bigmodel.streaming.slot_layout import SlotLayout
from accel_bigmodel.streaming.streamed_groups import StreamedGroup
from accel_bigmodel.streaming.types import Slot, Transfer
from accel_ckpt.modules.tensors import set_data
from accel_ckpt.tensor_storage import flat_bytes

__all__ = ["Resident"]


class Resident:
    """A group's tensors on the device, until ``restore``.

    Args:
        member: the group.
        transfer: to the device.
    """

    def __init__(self, member: StreamedGroup, transfer: Transfer) -> None:
        self._tensors = [item.tensor for item in member.items]
        self.nbytes = member.layout.nbytes
        self._hosts = [tensor.data for tensor in self._tensors]
        # Each in its own memory, because saving a tensor saves its whole storage.
        layouts = [SlotLayout([host]) for host in self._hosts]
        self._slots = [
            Slot(transfer.allocate(layout.pieces[0].nbytes), transfer.mark(None)) for layout in layouts
        ]
        copies = [
            transfer.copy(member.name, [host], layout, slot)
            for host, layout, slot in zip(self._hosts, layouts, self._slots, strict=True)
        ]
        for copy in copies:
            copy.wait()
        for tensor, layout, slot in zip(self._tensors, layouts, self._slots, strict=True):
            set_data(tensor, slot.views(layout)[0])

    def homes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Identities of the tensors, with their counterparts in host memory."""
        return ((id(tensor), host) for tensor, host in zip(self._tensors, self._hosts, strict=True))

    def restore(self) -> None:
        """Move the tensors back to host memory, with the values they have on the device."""
        for tensor, host in zip(self._tensors, self._hosts, strict=True):
            now = tensor.data.to(host.device)
            # Equal values are not written, which would copy the pages of a mapped file.
            if not _same_bytes(now, host):
                with torch.inference_mode():  # may write inference tensors and others
                    host.copy_(now)
            set_data(tensor, host)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(flat_bytes(one.contiguous()), flat_bytes(other.contiguous()))
