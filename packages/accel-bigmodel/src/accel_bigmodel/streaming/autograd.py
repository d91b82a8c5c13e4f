"""Saves a reference in place of a weight in a slot, which holds other weights by the time of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.streaming.slot_layout import address_of
from accel_bigmodel.streaming.streamed_groups import StreamedGroup, StreamedTensor

__all__ = ["Saving"]

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]
_Hooks = tuple[_Pack, _Unpack]


class Saving:
    """Saves which weight a view of a slot shows, instead of the view; the backward pass copies the weight again.

    Other tensors are saved as they would be without this: PyTorch calls only the innermost hooks, so these call the
    enclosing ones, such as those of activation checkpointing.

    Gradients of the weights themselves are refused, because their parameters are in host memory.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.slots: dict[int | None, StreamedGroup] = {}  # active groups by the address of their slot
        self._device = device
        self._refusals: dict[int, Any] = {}

    def around(self) -> saved_tensors_hooks:
        """The context for the forward of a group's module."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return saved_tensors_hooks(partial(self._pack, outer), _unpack)

    def _pack(self, outer: _Hooks | None, tensor: torch.Tensor) -> _Saved:
        member = self.slots.get(address_of(tensor))
        if member is None:
            return _SavedOther(tensor) if outer is None else _SavedByOthers(tensor, *outer)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        number = member.layout.piece_at(begin)
        return _SavedWeight(member, number, tensor, self._device)

    def refuse_gradients(self, member: StreamedGroup) -> None:
        """Make the backward pass raise where it would give a streamed parameter a gradient."""
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
            f"{self._name!r} is trainable, but its weights are on the device only while its module runs, so it cannot "
            "have a gradient: freeze it with requires_grad_(False), or place it on the device"
        )


class _SavedOther:
    """A tensor that is not a weight."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not the tensor itself: a result that its own function saves would keep itself alive forever.
        self._tensor = tensor.detach()
        self._version = tensor._version

    def again(self) -> torch.Tensor:
        if self._tensor._version != self._version:  # autograd does not check this where hooks are active
            raise RuntimeError(
                f"a tensor of the shape {tuple(self._tensor.shape)} and {self._tensor.dtype}, which the backward pass "
                "needs, was changed in place after the forward saved it; change a clone of it instead"
            )
        return self._tensor


class _SavedByOthers:
    """A tensor that is not a weight, as the enclosing hooks saved it."""

    def __init__(self, tensor: torch.Tensor, pack: _Pack, unpack: _Unpack) -> None:
        self._packed = pack(tensor)
        self._unpack = unpack

    def again(self) -> torch.Tensor:
        return self._unpack(self._packed)


class _SavedWeight:
    """A view of a weight, as the facts needed to rebuild it."""

    def __init__(self, member: StreamedGroup, number: int, view: torch.Tensor, device: torch.device) -> None:
        self._item: StreamedTensor = member.items[number]
        self._tensor = self._item.tensor
        self._version = self._item.version()
        self._piece = member.layout.pieces[number]
        self._device = device
        self._dtype, self._shape, self._stride = view.dtype, view.shape, view.stride()
        self._offset = view.storage_offset() - self._piece.begin // view.element_size()
        # Conjugation and negation are flags of a view; the memory holds the original numbers.
        self._conjugated, self._negated = view.is_conj(), view.is_neg()

    def again(self) -> torch.Tensor:
        piece = self._piece
        if self._item.tensor is not self._tensor or self._item.version() != self._version:
            raise OffloadError(
                f"{self._item.name!r} was changed after the forward whose backward pass needs it; change weights "
                "before the forward or after the backward pass"
            )
        buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        buffer.view(piece.dtype).as_strided(piece.shape, piece.stride).copy_(self._tensor.detach())
        view = buffer.view(self._dtype).as_strided(self._shape, self._stride, self._offset)
        view = view.conj() if self._conjugated else view
        return view.neg() if self._negated else view


_Saved = _SavedWeight | _SavedOther | _SavedByOthers


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.again()
