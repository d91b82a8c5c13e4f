"""Which tensors were computed from the values of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Provenance", "storages", "tensors_in"]

_aten = torch.ops.aten
_BY_FORM = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.randint_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided,
    }
)  # fmt: skip
"""Operations whose results depend on the shapes of tensors alone."""


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types here
    """Context that follows values from marked tensors through all operations, also those in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: dict[int, Any] = {}  # storages; held, so that no other one gets the number

    def mark(self, value: Any) -> None:
        """Follow the values of all tensors in a structure."""
        self._marked |= {storage._cdata: storage for storage in storages(value)}

    def reaches(self, value: Any) -> bool:
        """Whether a tensor in a structure was computed from the values of a marked one."""
        return any(storage._cdata in self._marked for storage in storages(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and mark its results if it read a marked tensor."""
        result = func(*args, **(kwargs or {}))
        if self._marked and func.overloadpacket not in _BY_FORM and self.reaches((args, kwargs)):
            self.mark(result)
        return result


def storages(value: Any) -> list[Any]:
    """The memory of all tensors in a structure; that of a tensor is also that of its views."""
    return [leaf.untyped_storage() for leaf in tensors_in(value)]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
