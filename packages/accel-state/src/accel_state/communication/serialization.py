"""Serialization of tensors and objects to the bytes of a message."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["aligned", "as_bytes", "bytes_of", "int64_bytes", "pack", "pickled", "unpack"]

_ALIGNMENT = 16
"""Bytes. Tensors in a message start at multiples of the largest item size, so they can be viewed in place."""


def bytes_of(leaf: Tensor) -> Tensor:
    """The values of a dense tensor as 1-D uint8: a view if it is contiguous, else a copy."""
    plain = leaf.detach()
    if plain.device.type == "xla":  # there, each new shape would be a program to compile
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    # Not view(-1): that keeps the stride of a single element, and then the dtype cannot change.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def aligned(size: int) -> int:
    """Bytes that ``size`` bytes occupy in a message."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pack(leaves: Sequence[Tensor], device: torch.device, ahead: int = 0) -> Tensor:
    """The values of all ``leaves`` in one message on ``device``, after ``ahead`` unused bytes."""
    if len(leaves) == 1 and not ahead:
        return bytes_of(leaves[0]).to(device)
    message = torch.empty(
        ahead + sum(aligned(leaf.nbytes) for leaf in leaves), dtype=torch.uint8, device=device
    )
    offset = ahead
    for leaf in leaves:
        size = leaf.nbytes
        message[offset : offset + size] = bytes_of(leaf)
        offset += aligned(size)
    return message


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a message with the dtypes and shapes of ``like``."""
    values = []
    offset = 0
    for leaf in like:
        values.append(message[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape))
        offset += aligned(leaf.nbytes)
    return values


def as_bytes(data: bytes) -> Tensor:
    """A copy of ``data`` as 1-D uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pickled(value: Any) -> tuple[Tensor | None, Exception | None]:
    """``value`` as 1-D uint8, or the error if it cannot be pickled."""
    try:
        return as_bytes(pickle.dumps(value)), None
    except Exception as error:  # any exception of a user's __reduce__; every rank raises
        return None, TypeError(f"cannot be pickled: {type(error).__name__}: {error}")


def int64_bytes(values: Sequence[int]) -> Tensor:
    """Integers as 1-D uint8, eight bytes each."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(torch.uint8)
