"""Objects besides tensors that ``torch.load(weights_only=True)`` may build: NumPy arrays and scalars of plain types.

NumPy's own functions take the state of a dtype from the file as it is: its sizes, offsets and flags. With the flag for
objects cleared, the bytes of an array become pointers to objects of the interpreter. So stand-ins take the place of
NumPy's names while a file is read. They pass on only what they have checked, to constructors that check as well, and
:func:`plain_data` puts real arrays in their place.
"""

from __future__ import annotations

import codecs
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["TORCH_SAFE_GLOBALS", "plain_data"]

_KINDS = frozenset("biufcSUMmV")
_LARGEST = 100_000_000  # values in one file, each counted as often as it is reached


class _Dtype:
    """Stands in for a dtype of NumPy while a file is read.

    Args:
        code: such as ``"f8"``, ``"V16"``.
        align: not needed: offsets are in the state.
        copy: not needed.
    """

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(code, str) or len(code) > 30:
            raise pickle.UnpicklingError(f"a NumPy dtype named {str(code)[:80]!r}")
        self.real = _checked(np.dtype(code))

    def __setstate__(self, state: Any) -> None:
        """Take byte order, size, fields and unit; flags and alignment are NumPy's to work out."""
        if not isinstance(state, tuple) or len(state) < 8:
            raise pickle.UnpicklingError("a NumPy dtype with a state of another form")
        _, order, sub, names, fields, size = state[:6]
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"a NumPy dtype of byte order {str(order)[:80]!r}")
        kind = self.real.kind
        if sub is not None:
            self.real = _divided(sub)
        elif fields is not None or names is not None:
            self.real = _structure(names, fields, size)
        elif kind in "SUV" and size != -1:
            self.real = _flexible(kind, size)
        elif kind in "mM":
            self.real = _dated(kind, state[8] if len(state) > 8 else None)
        if order in "<>":
            self.real = self.real.newbyteorder(order)


def _checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject or dtype.kind not in _KINDS:
        raise pickle.UnpicklingError(f"a NumPy array of {dtype}, which is not plain data")
    return dtype


def _structure(names: Any, fields: Any, size: Any) -> np.dtype[Any]:
    if not isinstance(names, tuple) or not isinstance(fields, Mapping) or set(names) != set(fields):
        raise pickle.UnpicklingError("a NumPy dtype whose fields have other names than it says")
    parts = [fields[name] for name in names]
    if not all(isinstance(part, tuple) and len(part) >= 2 and isinstance(part[0], _Dtype) for part in parts):
        raise pickle.UnpicklingError("a NumPy dtype with a field that has no dtype")
    about: Any = {"names": list(names), "formats": [part[0].real for part in parts], "itemsize": size}
    about["offsets"] = [part[1] for part in parts]
    return _checked(np.dtype(about))


def _divided(sub: Any) -> np.dtype[Any]:
    """The dtype of a field that is an array in every element."""
    if not isinstance(sub, tuple) or len(sub) != 2 or not isinstance(sub[0], _Dtype):
        raise pickle.UnpicklingError("a NumPy dtype of arrays of another form")
    base, shape = sub[0].real, sub[1]
    if (
        not isinstance(shape, tuple)
        or len(shape) > 8
        or not all(type(n) is int and 0 <= n < 1 << 31 for n in shape)
    ):
        raise pickle.UnpicklingError(f"a NumPy dtype of arrays of shape {str(shape)[:80]}")
    if math.prod(shape) * base.itemsize >= 1 << 31:
        raise pickle.UnpicklingError(f"a NumPy dtype of arrays of {str(shape)[:80]} {base}")
    return _checked(np.dtype((base, shape)))


def _flexible(kind: str, size: Any) -> np.dtype[Any]:
    per_item = 4 if kind == "U" else 1
    if type(size) is not int or not 0 <= size < 1 << 31 or size % per_item:
        raise pickle.UnpicklingError(f"a NumPy dtype of {str(size)[:80]} bytes")
    return np.dtype(f"{kind}{size // per_item}")


def _dated(kind: str, unit: Any) -> np.dtype[Any]:
    if unit is None:
        return np.dtype(kind)
    name, number = unit[1][:2]
    text = name.decode("ascii") if isinstance(name, bytes) else str(name)
    if not text.isalpha() or type(number) is not int:
        raise pickle.UnpicklingError(f"a NumPy dtype of the unit {str(unit)[:80]}")
    return np.dtype(kind if text == "generic" else f"{kind}8[{number}{text}]")


class _Array(np.ndarray[Any, Any]):
    """Stands in for an array of NumPy while a file is read."""

    def __setstate__(self, state: Any) -> None:
        """Take shape, dtype and bytes that fit together."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise pickle.UnpicklingError("a NumPy array with a state of another form")
        shape, dtype, fortran, raw = state[-4:]
        if not isinstance(dtype, _Dtype) or dtype.real.subdtype is not None or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("a NumPy array that is not plain data")
        if not isinstance(shape, tuple) or not all(
            type(size) is int and 0 <= size < 1 << 63 for size in shape
        ):
            raise pickle.UnpicklingError(f"a NumPy array of shape {str(shape)[:80]}")
        if math.prod(shape) * dtype.real.itemsize != len(raw):
            raise pickle.UnpicklingError(
                f"{len(raw)} bytes for a NumPy array of {str(shape)[:80]} {dtype.real}"
            )
        super().__setstate__((1, shape, dtype.real, bool(fortran), raw))  # type: ignore[arg-type]


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    """Stands in for NumPy's function of this name: an array of any content, which gets its own as a state."""
    if kind is not _Array:
        raise pickle.UnpicklingError("a NumPy array of another class")
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    """Stands in for NumPy's ``scalar``."""
    plain = isinstance(dtype, _Dtype) and dtype.real.subdtype is None and isinstance(raw, bytes)
    if not plain or len(raw) != dtype.real.itemsize:
        raise pickle.UnpicklingError("a NumPy scalar that is not plain data")
    return np.ndarray((), dtype.real, bytearray(raw) or None)[()]


def _bytes(*content: Any) -> bytes:
    """Stands in for ``bytes``, of which empty arrays are made; ``bytes(n)`` would allocate n bytes."""
    if content and not isinstance(content[0], bytes):
        raise pickle.UnpicklingError("bytes of something else than bytes")
    return content[0] if content else b""


TORCH_SAFE_GLOBALS: list[Any] = [
    # Files name these by the NumPy that wrote them.
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    (_bytes, "builtins.bytes"),
    codecs.encode,
]
"""Globals that ``load`` allows besides tensors, for NumPy arrays and scalars of plain types.

They are stand-ins; ``load`` puts plain arrays in their place.
"""


def plain_data(content: Any) -> Any:
    """Replace stand-ins in data that were read with ``TORCH_SAFE_GLOBALS`` by NumPy's arrays.

    Lists and dictionaries are changed in place.

    Raises:
        UnpicklingError: a sparse tensor has an index outside of it, a container holds itself, or one holds others so
            often that walking it would never end.
    """
    return _Walk().plain(content)[0]


class _Walk:
    def __init__(self) -> None:
        self._open: set[int] = set()
        self._done: dict[int, tuple[Any, Any, int]] = {}  # the original is kept, so that its id stays its own

    def plain(self, value: Any) -> tuple[Any, int]:
        """The value without stand-ins, and the number of values in it."""
        if isinstance(value, torch.Tensor):
            _check_sparse(value)
            return value, 1
        if isinstance(value, _Array):
            return value.view(np.ndarray), 1
        if isinstance(value, _Dtype):
            return value.real, 1
        if not isinstance(value, (list, tuple, dict, set)):
            return value, 1
        if id(value) in self._done:
            return self._done[id(value)][1:]
        if id(value) in self._open:
            raise pickle.UnpicklingError("a container that holds itself")
        self._open.add(id(value))
        found, size = self._container(value)
        self._open.discard(id(value))
        if size > _LARGEST:
            raise pickle.UnpicklingError(f"containers that hold each other more than {_LARGEST} times")
        self._done[id(value)] = value, found, size
        return found, size

    def _container(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, dict):
            size = 1
            for key, item in value.items():
                value[key], inside = self.plain(item)
                size += inside + (self.plain(key)[1] if isinstance(key, tuple) else 0)
            return value, size
        if isinstance(value, set):
            return value, 1 + sum(self.plain(item)[1] for item in value)
        pairs = [self.plain(item) for item in value]
        size = 1 + sum(inside for _, inside in pairs)
        items = [item for item, _ in pairs]
        if isinstance(value, list):
            value[:] = items
            return value, size
        same = all(new is old for new, old in zip(items, value, strict=True))
        return (value if same else tuple(items)), size


def _check_sparse(tensor: torch.Tensor) -> None:
    """Torch takes the indices of a sparse tensor from the file as they are."""
    if tensor.layout == torch.strided or tensor.is_meta:
        return
    try:
        if tensor.layout == torch.sparse_coo:
            parts: Sequence[Any] = tensor._indices(), tensor._values(), tensor.shape
            torch.sparse_coo_tensor(*parts, is_coalesced=tensor.is_coalesced(), check_invariants=True)
        else:
            by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
            inner = tensor.col_indices() if by_row else tensor.row_indices()
            parts = outer, inner, tensor.values(), tensor.shape
            torch.sparse_compressed_tensor(*parts, layout=tensor.layout, check_invariants=True)
    except RuntimeError as error:
        raise pickle.UnpicklingError(f"a sparse tensor whose indices do not fit it: {error}") from error
