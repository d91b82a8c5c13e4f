"""What a process holds: bytes of its tensors, and its resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_ckpt.format.index import WeightFiles
from accel_ckpt.loading.weights import MappedWeights

__all__ = ["Allocations", "Growth", "freed_at_once", "growth", "mapped_weights", "tensor_bytes"]

_MMAP_THRESHOLD = -3  # of mallopt
_TRIM_THRESHOLD = -1


def mapped_weights(*files: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files by name, as views of the mapped files."""
    source = MappedWeights(WeightFiles(tuple(Path(file) for file in files)))
    return {name: source.tensor(source.key_of(name)) for name in source.about}


def tensor_bytes() -> int:
    """Bytes of the storages of all live tensors, each storage once; of a `DTensor` this rank's part."""
    gc.collect()
    found: dict[int, int] = {}
    waiting = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    # A gradient that no one has asked for has no Python object.
    waiting += [item.grad for item in waiting if item.is_leaf and item.grad is not None]
    for item in waiting:
        local = item.to_local() if isinstance(item, DTensor) else item
        if local.layout is torch.strided and local.device.type != "meta":
            storage = local.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def freed_at_once() -> None:
    """Let this process give blocks of 64 KiB and more back to the system when they are freed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, 1 << 16)


@dataclass
class Growth:
    """Resident memory inside a block, in bytes beyond that at its start.

    Attributes:
        peak: the most.
        end: what is left.
    """

    peak: int = 0
    end: int = 0


@contextlib.contextmanager
def growth() -> Iterator[Growth]:
    """Measure a block; Linux only."""
    gc.collect()
    result = Growth()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    yield result
    result.peak = _status("VmHWM") - before
    gc.collect()
    result.end = _status("VmRSS") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Allocations(TorchDispatchMode):
    """Counts the memory of the tensors that torch makes inside a block; views need none.

    Attributes:
        peak: the most bytes that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = set(map(_address, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            address = _address(made)
            if address and address not in known:
                storage = _local(made).untyped_storage()
                self._live[address] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without dispatching to torch."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _address(value: object) -> int:
    """Where the values of a tensor are; 0 if in no memory of their own."""
    if not isinstance(value, torch.Tensor):
        return 0
    local = _local(value)
    plain = local.layout is torch.strided and local.device.type != "meta"
    return local.untyped_storage().data_ptr() if plain else 0
