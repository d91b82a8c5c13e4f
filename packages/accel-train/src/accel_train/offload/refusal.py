"""Tensors that refuse to be used while their values are somewhere else.

A kernel does not notice that the memory of a tensor was freed: it reads from address zero, which ends the process, or
on a GPU makes it unusable. So such a tensor is given a subclass of its class whose `__torch_function__` refuses every
operation; it stays the same object, and gets its class back later.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from accel_train.errors import OffloadedStatesError

__all__ = ["allow_use", "is_refused", "refuse_use"]

# What needs no values. Names are those of `torch.overrides.resolve_name`.
_GETTERS = {
    "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn",
    "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "layout",
    "names", "nbytes", "ndim", "requires_grad", "retains_grad", "shape",
}  # fmt: skip
_METHODS = {
    "__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "nelement",
    "numel", "requires_grad_", "size", "storage_offset", "stride",
}  # fmt: skip
_ALLOWED = frozenset(
    {f"torch.Tensor.{name}.__get__" for name in _GETTERS}
    | {f"torch.Tensor.{name}" for name in _METHODS}
    # Gradients may be dropped.
    | {"torch.Tensor.grad.__set__", "torch.Tensor.grad.__delete__", "torch.Tensor.requires_grad.__set__"}
)


class _Refusing:
    """Marks the classes."""

    __slots__ = ()


def refuse_use(tensor: Tensor) -> None:
    """Let a tensor refuse every operation that needs its values; twice is as good as once."""
    if not isinstance(tensor, _Refusing):
        tensor.__class__ = _refusing(type(tensor))


def allow_use(tensor: Tensor) -> None:
    """Let a tensor be used again."""
    if isinstance(tensor, _Refusing):
        tensor.__class__ = type(tensor).__mro__[1]


def is_refused(tensor: Tensor | None) -> bool:
    """Whether a tensor refuses to be used."""
    return isinstance(tensor, _Refusing)


@cache
def _refusing(kind: type[Tensor]) -> type[Tensor]:
    """A subclass of a class of tensors, without attributes of its own, so that an object can change between both."""

    def refuse(
        cls: type, function: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = resolve_name(function) or getattr(function, "__name__", str(function))
        if name in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise OffloadedStatesError(
            f"{name} was called with a tensor whose values are in host memory since accelerator.offload_states(). Call "
            "accelerator.reload_states() first."
        )

    def describe(self: Tensor, **_: Any) -> str:
        return (
            f"<{kind.__name__} of shape {list(self.shape)}, in host memory until accelerator.reload_states()>"
        )

    body = {
        "__slots__": (),
        "__module__": __name__,
        "__torch_function__": classmethod(refuse),
        "__repr__": describe,
    }
    return types.new_class(
        f"Offloaded{kind.__name__}", (kind, _Refusing), exec_body=lambda names: names.update(body)
    )
