"""Staging: copies of what a save will write, so that training can go on while it is written.

What an optimizer changes is copied in the background, while the next forward and backward run, and the optimizer
waits before its step until that is done. Everything else is copied before :class:`Staging` returns, because nobody
could say when it changes: buffers in forward, gradients in backward, random states at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from accel_ckpt.saving import StatePlan
from accel_ckpt.tensors import id_tensor_storage, same_tensor_id

__all__ = ["HostBuffers", "Staging"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Bytes copied at a time. Between two pieces the thread asks for the interpreter's lock, which training may hold.
_PIECE = 1 << 24


class HostBuffers:
    """Host memory that one save after the other copies to: new memory costs several times the copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """So many bytes, with a storage of their own; ``pinned`` for copies from an accelerator."""
        free = self._free.get((nbytes, pinned))
        if free:
            return free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def give_back(self, buffer: torch.Tensor, pinned: bool) -> None:
        """Let the next save have it."""
        self._free.setdefault((buffer.nbytes, pinned), []).append(buffer)

    def clear(self) -> None:
        """Forget what is not in use."""
        self._free.clear()


class Staging:
    """The copies of one save.

    Tensors that are one and the same stay one, and views of a storage that holds nothing else stay views of one;
    so what is written is what would have been written of the originals.

    Args:
        plan: what will be written.
        optimizers: what they step, and their states, is copied by :meth:`copy`.
        buffers: where to.

    Attributes:
        plan: the same plan, for the copies.
    """

    def __init__(
        self, plan: StatePlan, optimizers: Sequence[torch.optim.Optimizer], buffers: HostBuffers
    ) -> None:
        self._buffers = buffers
        self._taken: list[tuple[torch.Tensor, bool]] = []
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self._on_host: deque[tuple[Bytes, Bytes]] = deque()
        self._streams: dict[torch.device, torch.Stream] = {}  # for what is copied while a device computes
        self._devices: set[torch.device] = set()
        self._sources: list[torch.Tensor] = []  # kept alive while a device copies them
        self._later = {id_tensor_storage(t) for o in optimizers for t in _stepped(o)}
        self.plan = plan.with_tensors(self._stage)
        buffers.clear()
        self._later_events = {device: stream.record_event() for device, stream in self._streams.items()}
        self._events = [torch.accelerator.current_stream(device).record_event() for device in self._devices]
        self._events += self._later_events.values()
        self._host_done = threading.Event()
        self._done = threading.Event()
        if not self._on_host:
            self._host_done.set()
            if not self._events:
                self._done.set()

    def done(self) -> bool:
        """Whether every copy is complete."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every copy is complete; returns whether it is."""
        return self._done.wait(timeout)

    def hold_back(self) -> None:
        """Let what this thread does next begin when every copy is complete."""
        for device, event in self._later_events.items():  # the device waits; this thread need not
            torch.accelerator.current_stream(device).wait_event(event)
        self._host_done.wait()

    def copy(self) -> None:
        """Complete the copies. For one thread."""
        while self._on_host:
            target, source = self._on_host.popleft()
            np.copyto(target, source)
        self._host_done.set()
        self._await_devices()
        self._done.set()

    def release(self) -> None:
        """Give up the copies, complete or not, and let go whoever waits."""
        self._on_host.clear()
        self._host_done.set()
        self._await_devices()
        self._done.set()
        self.plan = StatePlan({}, ())
        self._copies.clear()
        while self._taken:
            self._buffers.give_back(*self._taken.pop())

    def _await_devices(self) -> None:
        for event in self._events:
            event.synchronize()
        self._sources.clear()

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if plain.device.type == "meta" or plain.numel() == 0:
            return plain
        is_special = plain.is_conj() or plain.is_neg() or type(plain) is not torch.Tensor
        if plain.layout != torch.strided or is_special:
            return plain.to("cpu", copy=True)
        storage = plain.untyped_storage()
        whole = storage.nbytes() == plain.nbytes
        key: tuple[Any, ...] = id_tensor_storage(plain) if whole else same_tensor_id(plain)
        source = _bytes_of(plain, whole)
        if key not in self._copies:
            self._copies[key] = self._copy_of(source, later=id_tensor_storage(plain) in self._later)
        if not whole:
            return self._copies[key].view(plain.dtype).view(plain.shape)
        copied: torch.Tensor = torch.empty(0, dtype=plain.dtype).set_(
            self._copies[key].untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
        )
        return copied

    def _copy_of(self, source: torch.Tensor, later: bool) -> torch.Tensor:
        device = source.device
        pinned = device.type != "cpu"
        target = self._buffers.take(source.nbytes, pinned)
        self._taken.append((target, pinned))
        if not pinned and later:
            self._on_host.extend(_pieces(target, source))
        elif not pinned:
            target.copy_(source)
        else:
            self._sources.append(source)
            if not later:
                self._devices.add(device)
                target.copy_(source, non_blocking=True)
            else:
                with self._side_stream(device):
                    target.copy_(source, non_blocking=True)
        return target

    def _side_stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
            self._streams[device].wait_stream(torch.accelerator.current_stream(device))
        return self._streams[device]


def _bytes_of(tensor: torch.Tensor, whole: bool) -> torch.Tensor:
    """The storage of a tensor that fills it, else the tensor's elements in order, as 1-D uint8."""
    if whole:
        raw: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return raw.set_(tensor.untyped_storage())
    return tensor.contiguous().view(-1).view(torch.uint8)


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    to, origin = target.numpy(), source.numpy()
    for start in range(0, len(to), _PIECE):
        yield to[start : start + _PIECE], origin[start : start + _PIECE]


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, and the tensors of their states."""
    yield from _tensors([group["params"] for group in optimizer.param_groups])
    yield from _tensors(list(optimizer.state.values()))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        local = tree.detach()
        yield getattr(
            local, "to_local", lambda: local
        )()  # of a tensor that is divided among ranks, this one's part
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
