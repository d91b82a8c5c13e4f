"""The memory of DDP's communication buckets, which its C++ side alone holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Buckets"]


class Buckets:
    """Finds the buckets of one wrapper, without keeping them alive.

    DDP tells nobody where they are: gradients are views of them, but dropped gradients leave a bucket of which nothing
    is seen. So this looks at the operators that run where DDP forms buckets: it makes views of each.
    """

    def __init__(self) -> None:
        self._found: dict[int, StorageWeakRef] = {}

    @contextmanager
    def formed(self) -> Iterator[None]:
        """Context in which DDP may form buckets."""
        with _Views() as views:
            yield
        for base in views.bases:
            found = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
            self._found.setdefault(found.cdata, found)

    def tensors(self) -> list[Tensor]:
        """The bytes of each bucket."""
        for key in [key for key, found in self._found.items() if found.expired()]:  # type: ignore[no-untyped-call]
            del self._found[key]
        storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._found)
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages
            if storage is not None
        ]

    def __reduce__(self) -> tuple[type[Buckets], tuple[()]]:
        return Buckets, ()  # a copied wrapper has others


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors of which views are made with sizes and strides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bases: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.as_strided.default:
            self.bases.append(args[0])
        return func(*args, **(kwargs or {}))
