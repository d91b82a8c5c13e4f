"""Copies of device memory in host memory, and the way back, for tensors that stay the same objects.

What moves is the memory below the tensors (`torch.UntypedStorage`), not the tensors. A storage of size zero has no
memory on the device, and everything that looks at it stays linked: parameters in optimizers, tied weights, the
gradients that are views of DDP's buckets, the flat parts that FSDP gathers from, the hooks of autograd. A swap of
`tensor.data` would cut the C++ side off, which nobody can reach from Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.format.memory import FileImage, HostBuffers
from accel_state.host.devices import empty_cache
from accel_train.errors import OffloadedStatesError
from accel_train.offload.refusal import allow_use, refuse_use
from accel_train.offload.tensors import Kinded

__all__ = ["HostCopies", "HostMemory", "Offloaded"]

_IN_HOST_MEMORY = frozenset({"cpu", "meta", "mps"})  # mps: the processor and its GPU share one memory


class Offloaded(Protocol):
    """States that were moved to host memory."""

    @property
    def freed(self) -> Mapping[tuple[str, str], int]:
        """Bytes that were freed, by kind of state and device."""
        ...

    @property
    def kept(self) -> Mapping[str, int]:
        """Bytes that stay on the device, by the reason."""
        ...

    def check_reload(self, others: Iterable[Offloaded]) -> None:
        """Check that the states can be used after a reload together with others; changes nothing.

        Raises:
            OffloadedStatesError: they share memory with states that stay away.
        """
        ...

    def reload(self) -> None:
        """Move the states back.

        Raises:
            OffloadedStatesError: the device has too little memory; the states are still in host memory.
        """
        ...


class HostMemory:
    """The host memory of copies. It is kept, because pinned memory takes longer to make than to fill.

    Args:
        pinned: pin it, so that copies run at the rate of the bus.
    """

    def __init__(self, pinned: bool = True) -> None:
        self.pinned = pinned
        self.buffers = HostBuffers()


class HostCopies:
    """The memory of some tensors, moved to host memory; the tensors refuse to be used until it is back.

    Tensors that are in host memory already only refuse to be used, so a script does the same on a laptop.

    Args:
        tensors: with their kinds; those that share memory with others, several times.
        memory: where the copies are.

    Attributes:
        freed: bytes by kind and device.
        kept: bytes that stay on the device, by the reason.

    Raises:
        OffloadedStatesError: there is too little host memory; nothing has changed.
    """

    def __init__(self, tensors: Iterable[Kinded], memory: HostMemory) -> None:
        self.freed: Counter[tuple[str, str]] = Counter()
        self.kept: Counter[str] = Counter()
        self._memory = memory
        self._tensors: list[Tensor] = []
        self._moved: list[tuple[torch.UntypedStorage, int]] = []  # with sizes
        self._elsewhere: list[
            torch.UntypedStorage
        ] = []  # of other copies, with which these tensors share memory
        self._take_stock(tensors)
        self._image = self._copy()
        for storage, _ in self._moved:
            storage.resize_(0)
        for tensor in self._tensors:
            refuse_use(tensor)

    def _take_stock(self, tensors: Iterable[Kinded]) -> None:
        seen: set[int] = set()
        for kind, tensor in tensors:
            self._tensors.append(tensor)
            if is_traceable_wrapper_subclass(cast(object, tensor)) or tensor.device.type in _IN_HOST_MEMORY:
                continue
            storage = _storage_of(tensor)
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            size = storage.nbytes()
            if size and storage.resizable():
                self._moved.append((storage, size))
                self.freed[kind, str(tensor.device)] += size
            elif size:
                self.kept["memory that torch did not allocate"] += size
            elif tensor.numel():
                self._elsewhere.append(storage)

    def _copy(self) -> FileImage:
        memory, total = self._memory, sum(size for _, size in self._moved)
        pinned = memory.pinned and total > 0
        try:
            image = FileImage(total, memory.buffers, pinned)
        except (MemoryError, RuntimeError) as error:
            raise OffloadedStatesError(
                f"offload_states() could not allocate {total} bytes of {'pinned ' if pinned else ''}host memory, so "
                f"nothing was moved: {error}. Free host memory{', or pass pin_memory=False' if pinned else ''}."
            ) from error
        self._wait()  # other streams may still write, as the reductions of FSDP do
        try:
            for device, host in self._pairs(image):
                host.copy_(device, non_blocking=True)
            self._wait()
        except BaseException:
            image.release()
            raise
        return image

    def _pairs(self, image: FileImage) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes on the device and in host memory, piece by piece."""
        begin = 0
        for storage, size in self._moved:
            device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for host in image.spans(begin, begin + size):
                yield device[: len(host)], host
                device = device[len(host) :]
            begin += size

    def _wait(self) -> None:
        for device in {storage.device for storage, _ in self._moved}:
            torch.accelerator.synchronize(device)

    def check_reload(self, others: Iterable[Offloaded]) -> None:
        """Check that memory which these tensors share is there, or comes back too."""
        back = {s._cdata for other in others if isinstance(other, HostCopies) for s, _ in other._moved}
        if any(not storage.nbytes() and storage._cdata not in back for storage in self._elsewhere):
            raise OffloadedStatesError(
                "reload_states() was called for an object that shares tensors with another one, which was offloaded "
                "before it and stays in host memory. Reload both together, or all: reload_states()."
            )

    def reload(self) -> None:
        """Move the memory back; the tensors can be used again."""
        self._allocate()
        for device, host in self._pairs(self._image):
            device.copy_(host, non_blocking=True)
        self._wait()  # before other copies get the host memory
        self._image.release()
        self._moved.clear()
        for tensor in self._tensors:
            allow_use(tensor)

    def _allocate(self) -> None:
        try:
            for storage, size in self._moved:
                storage.resize_(size)
        except RuntimeError as error:
            for storage, _ in self._moved:
                storage.resize_(0)
            empty_cache()
            total = sum(size for _, size in self._moved)
            raise OffloadedStatesError(
                f"reload_states() could not allocate the {total} bytes on the device, so the states are still in host "
                f"memory: {error}. Free memory there, of the other engine for example, and call reload_states() again."
            ) from error


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # of tensors that refuse to be used
        return tensor.untyped_storage()
