"""Tensors that share memory, plain dense copies of other tensors, and names of dtypes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.errors import UnsupportedValueError

__all__ = ["clean_state_dict_for_safetensors", "compact", "id_tensor_storage", "parse_dtype", "tied_aliases"]

logger = logging.getLogger(__name__)

# Names of the safetensors format; https://github.com/huggingface/safetensors#format
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.complex64: "C64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

StorageId: TypeAlias = tuple[torch.device, int, int]

# Bytes from which on the call costs less than what it saves.
_MEMORY_COPY = 1 << 16

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Metadata of a safetensors file that holds parts of tensors;
https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/_hf_utils.py
"""
VERSIONS_KEY = "state_dict_versions"
"""Metadata of a safetensors file that says in which form modules saved their state dicts."""
METADATA_KEYS = frozenset({"format", SHARDING_KEY, VERSIONS_KEY, "__metadata__"})
"""Keys of a safetensors header that mean something; as the name of an alias they would be overwritten."""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Turn ``"float16"`` or ``"torch.float16"`` into the dtype; dtypes pass.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype; give one such as torch.bfloat16 or 'bfloat16'")
    return found


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as 1-D uint8, on its device."""
    # Not view(-1): that keeps the stride of a single element, and then the dtype cannot change.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape, without autograd.

    Contiguous memory of one dtype on the CPU is copied by the C library, which takes less time than torch.
    """
    same = values.nbytes >= _MEMORY_COPY and (into.dtype, into.shape) == (values.dtype, values.shape)
    if same and is_plain_memory(into) and is_plain_memory(values) and not into.is_inference():
        as_bytes(into)[:] = as_bytes(values)
        torch.autograd.graph.increment_version(into)
        return
    with torch.no_grad():
        into.copy_(values)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous memory on the CPU that holds its values as they are."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
    )


def is_lazy(tensor: Any) -> bool:
    """Whether a tensor belongs to a lazy module that has not run yet."""
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def why_not_plain(tensor: Any) -> str | None:
    """The reason why a tensor is not plain values in memory, with advice; ``None`` if it is."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "is lazy and has no shape yet; run the model once first"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values; load its weights first"
    if hasattr(tensor, "full_tensor"):
        return "is sharded over ranks; pass the full tensor, as full_tensor() gives it"
    if tensor.is_nested:
        return "is nested; save its parts, as unbind() gives them"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; make it dense with to_dense() first"
    if tensor.is_quantized:
        return "is quantized; save dequantize(), or int_repr() with its scale and zero point"
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__qualname__}, which consists of other tensors; save those"
    return None


def id_tensor_storage(tensor: Any) -> StorageId:
    """Identify the memory of a tensor: device, address of the storage, size of the storage in bytes.

    Tensors without one block of memory of their own (on the meta device, empty, sparse) are distinguished by the
    tensor object.
    """
    if tensor.layout != torch.strided or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        return tensor.device, id(tensor), 0
    if (
        tensor.device.type == "xla"
    ):  # no addresses, but numbers, which a tensor shares with what detach() gives
        return tensor.device, sys.modules["torch_xla"]._XLAC._xla_get_tensor_id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    address = 0 if tensor.device.type == "meta" else storage.data_ptr()
    return tensor.device, address or id(tensor), storage.nbytes()


def same_tensor_id(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identify a tensor's view of memory: equal for two tensors exactly if they are the same view of the same
    memory.
    """
    where = id_tensor_storage(tensor)
    if where[2] == 0:
        return where
    # conj() and neg() are bits of a view: its memory holds other values than it reads as.
    bits = tensor.is_conj(), tensor.is_neg()
    return (*where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, bits)


def tied_aliases(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map every name whose tensor has an earlier name to that earlier name.

    Only identical views count. Two different views of one storage are two tensors: dropping one would lose
    data.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_dict.items():
        original = first.setdefault(same_tensor_id(tensor), name)
        if original != name and name not in METADATA_KEYS:
            aliases[name] = original
    return aliases


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a state dict that safetensors accepts; the given one is not changed.

    If several names hold the same tensor, only the first is kept, with a warning. Other tensors that only share a
    storage, and tensors that are not contiguous, are copied.

    Raises:
        UnsupportedValueError: a tensor is not plain values in memory: lazy, on the meta device, sparse, quantized.
    """
    for name, tensor in state_dict.items():
        if (reason := why_not_plain(tensor)) is not None:
            raise UnsupportedValueError(f"the tensor {name!r} {reason}")
    aliases = tied_aliases(state_dict)
    if aliases:
        logger.warning(
            "Removed names of shared tensors, which are kept under their first name: %s",
            ", ".join(f"{alias} (same as {name})" for alias, name in aliases.items()),
        )
    used: set[StorageId] = set()
    cleaned: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        if name in aliases:
            continue
        storage = id_tensor_storage(tensor)
        tensor = tensor.resolve_conj().resolve_neg()
        fits = tensor.is_contiguous() and storage not in used and _fills_storage(tensor)
        used.add(storage)
        cleaned[name] = tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
    return cleaned


def compact(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy views of larger storages, which ``torch.save`` would write whole; tied names stay tied."""
    aliases = tied_aliases(tensors)
    result: dict[str, torch.Tensor] = {}
    dtypes: dict[StorageId, torch.dtype] = {}  # torch.save refuses one storage with two dtypes
    for name, tensor in tensors.items():
        if name in aliases:
            result[name] = result[aliases[name]]
            continue
        plain = tensor.detach().cpu()
        if why_not_plain(tensor) is None:
            storage = id_tensor_storage(tensor)
            whole = storage[2] == tensor.nbytes and dtypes.setdefault(storage, tensor.dtype) == tensor.dtype
            # A subclass could not be read back: reading would have to import it.
            plain = plain.as_subclass(torch.Tensor)
            plain = plain if whole else plain.clone(memory_format=torch.contiguous_format)
        result[name] = plain
    return result


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
