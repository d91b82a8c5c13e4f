"""Sizes of module trees in bytes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import nn

from accel_ckpt.modules.tensors import check_is_module, named_module_tensors
from accel_ckpt.tensor_storage import parse_dtype

__all__ = [
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "dtype_byte_size",
    "get_max_layer_size",
]

DType = torch.dtype | str | Enum
"""A dtype, its name, or an enum member whose value is its name, such as ``CustomDtype.FP8``."""

# "fp8" means any of the 8-bit floats; PyTorch has no dtype of that name.
_NAMES_OF_KINDS = {"fp8": 1}


def dtype_byte_size(dtype: DType) -> float:
    """Return the bytes per number of a dtype, from the number of bits in its name; an integer if it is whole.

    1/8 for booleans, 1/2 for ``int4`` and also for ``float4_e2m1fn_x2``, whose elements are bytes with two numbers.
    PyTorch stores a boolean, or an element of a plain tensor of such a dtype, in a whole byte; for existing tensors
    that size counts.

    Raises:
        ValueError: there is no such dtype.
    """
    name = dtype.value if isinstance(dtype, Enum) else dtype
    if name in _NAMES_OF_KINDS:
        return _NAMES_OF_KINDS[name]
    found = parse_dtype(name)
    if found == torch.bool:
        return 1 / 8
    bits = re.search(r"[a-z](\d+)", str(found).removeprefix("torch."))
    assert bits is not None, f"the name of {found} holds no number of bits"
    whole, rest = divmod(int(bits.group(1)), 8)
    return whole + rest / 8 if rest else whole


def compute_module_sizes(
    model: nn.Module,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Compute the bytes of every submodule and tensor by name; ``""`` is the total, and a missing name counts 0.

    A tied parameter is counted once, under the first of its names.

    Args:
        model: the module, on any device.
        dtype: floating-point tensors count with at most this dtype's size.
        special_dtypes: dtypes of single tensors by name; they have precedence over ``dtype``.
        buffers_only: leave out the parameters.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    cap = None if dtype is None else dtype_byte_size(dtype)
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only):
        size = float(_bytes(tensor))
        if special_dtypes is not None and name in special_dtypes:
            size = tensor.numel() * dtype_byte_size(special_dtypes[name])
        elif cap is not None and tensor.dtype.is_floating_point:
            size = min(size, tensor.numel() * cap)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += math.ceil(size)
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: DType | None = None, special_dtypes: Mapping[str, DType] | None = None
) -> int:
    """Compute the bytes of all buffers; the arguments are those of ``compute_module_sizes``."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Find the size of the largest layer, and the names of all layers of that size.

    A layer is a module without children, a module of a class that must not be split, or a single tensor of ``modules``.

    Args:
        modules: names, and the modules or tensors to search.
        module_sizes: bytes by name, as from ``compute_module_sizes``.
        no_split_module_classes: names of classes that must not be split.
    """
    largest = 0
    names: list[str] = []
    rest = list(reversed(modules))
    while rest:
        name, module = rest.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            rest += [(f"{name}.{child}", part) for child, part in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Compute the bytes of a model and of its largest layer, with the names of the layers of that size.

    Classes that transformers lists in ``_no_split_modules`` are layers.
    """
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or ())


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's elements take; those of the tensors inside, where it wraps others (quantised)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return sum(_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _tensors(model: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if buffers_only:
        return iter(model.named_buffers(recurse=True))
    return named_module_tensors(model, recurse=True)
