"""What autograd saves of weights in a slot: the slot will hold others when the backward pass comes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.streaming.members import Item, Member
from accel_bigmodel.streaming.slots import address_of

__all__ = ["Saving"]


class Saving:
    """Saves, in place of a view of a slot, which weight it shows; the backward pass copies that anew.

    Gradients of the weights themselves are refused, for their parameters wait in host memory.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.hooks = saved_tensors_hooks(self._pack, _unpack)
        self.slots: dict[int | None, Member] = {}  # active groups by the address of their slot
        self._device = device
        self._refusals: dict[int, Any] = {}

    def _pack(self, tensor: torch.Tensor) -> Any:
        member = self.slots.get(address_of(tensor))
        if member is None:
            return tensor
        begin = int(tensor.storage_offset()) * tensor.element_size()
        number = member.layout.piece_at(begin)
        return _SavedWeight(member, number, tensor, self._device)

    def refuse_gradients(self, member: Member) -> None:
        """Let the backward pass raise where it would give a streamed parameter a gradient."""
        for item in member.items:
            tensor = item.tensor
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._refusals:
                self._refusals[id(tensor)] = tensor.register_hook(_Refusal(item.name))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Allow gradients again."""
        for handle in self._refusals.values():
            handle.remove()
        self._refusals.clear()


class _Refusal:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: torch.Tensor) -> NoReturn:
        raise OffloadError(
            f"{self._name!r} is trainable, but its weights are moved to the device only while its module runs, so it "
            "cannot have a gradient: freeze it with requires_grad_(False), or place it on the device"
        )


class _SavedWeight:
    """A view of a weight, by what it takes to make it again."""

    def __init__(self, member: Member, number: int, view: torch.Tensor, device: torch.device) -> None:
        self._item: Item = member.items[number]
        self._tensor = self._item.tensor
        self._version = self._item.version()
        self._piece = member.layout.pieces[number]
        self._device = device
        self._dtype, self._shape, self._stride = view.dtype, view.shape, view.stride()
        self._offset = view.storage_offset() - self._piece.begin // view.element_size()

    def again(self) -> torch.Tensor:
        piece = self._piece
        if self._item.tensor is not self._tensor or self._item.version() != self._version:
            raise OffloadError(
                f"{self._item.name!r} was changed after the forward whose backward pass needs it; "
                "change weights before the forward or after the backward pass"
            )
        buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        buffer.view(piece.dtype).as_strided(piece.shape, piece.stride).copy_(self._tensor.detach())
        return buffer.view(self._dtype).as_strided(self._shape, self._stride, self._offset)


def _unpack(saved: Any) -> torch.Tensor:
    return saved.again() if isinstance(saved, _SavedWeight) else saved
