"""Sizes of module trees in bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from accel_ckpt.modules.tensors import named_module_tensors
from accel_ckpt.tensors import parse_dtype

__all__ = ["compute_module_sizes", "compute_module_total_buffer_size", "dtype_byte_size"]


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Bytes per element. Booleans count as 1/8; names such as ``"int4"`` and ``"int2"`` count their bits."""
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    bits = re.search(r"int(\d+)$", dtype)
    return int(bits.group(1)) / 8 if bits else parse_dtype(dtype).itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every submodule and tensor by name; ``""`` is the total.

    Args:
        model: the module, on any device.
        dtype: floating tensors count with at most this dtype's size.
        special_dtypes: dtypes of single tensors by name; they go before ``dtype``.
        buffers_only: leave out the parameters.
    """
    cap = None if dtype is None else dtype_byte_size(parse_dtype(dtype))
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only):
        if special_dtypes is not None and name in special_dtypes:
            size = tensor.numel() * dtype_byte_size(special_dtypes[name])
        elif cap is None or not tensor.dtype.is_floating_point:
            size = tensor.numel() * tensor.element_size()
        else:
            size = tensor.numel() * min(cap, tensor.element_size())
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += int(size)
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Bytes of all buffers; the arguments are those of ``compute_module_sizes``."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def _tensors(model: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if buffers_only:
        return iter(model.named_buffers(recurse=True))
    return named_module_tensors(model, recurse=True)
