"""Bytes of the tensors of this process: now, and at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TensorMemory"]

_NOTICED = 1.01
"""Growth of the peak from which sizes are read again: storages are also resized by means that no operation shows."""


_Mode: Any = TorchDispatchMode  # whose methods have no types


class TensorMemory(_Mode):  # type: ignore[misc]
    """``with TensorMemory() as memory:`` counts the memory of tensors that operations return inside the block.

    Each storage counts once, for as long as it lives. Memory that a kernel allocates and frees inside one operation is
    not counted. Tensors from worker processes are counted only once something is computed from them.

    Attributes:
        live: bytes now.
        peak: most bytes so far, to one per cent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and its like first turn into operations of their parts
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._add(result)
        elif isinstance(result, tuple | list):
            for item in _tensors(result):
                self._add(item)
        return result

    def _add(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        key, size = id(storage), storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._drop(key)), size
        self.live += size
        if self.live > self.peak * _NOTICED:
            self._measure()
            self.peak = max(self.peak, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    def _measure(self) -> None:
        """Read the sizes of all storages: FSDP2 resizes those of gathered parameters."""
        for key, (reference, size) in list(self._known.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._known[key] = reference, storage.nbytes()
                self.live += storage.nbytes() - size


_PLAIN = (Tensor, torch.nn.Parameter)


def _tensors(items: Any) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from _tensors(item)
