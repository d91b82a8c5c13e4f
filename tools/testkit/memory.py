"""What a process holds: bytes of its tensors, and its resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Growth", "freed_at_once", "growth", "tensor_bytes"]

_MMAP_THRESHOLD = -3  # of mallopt
_TRIM_THRESHOLD = -1


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
