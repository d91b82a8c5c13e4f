"""Staging: copies of what a save will write, so that training can continue while they are written.

What an optimizer changes is copied in the background, while the next forward and backward run, and the optimizer
waits before its step until that is done. Everything else is copied before :class:`Staging` returns, because nobody
could say when it changes: buffers in forward, gradients in backward, random states at any time.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from accel_ckpt.disk import Disk
from accel_ckpt.memory import FileImage, HostBuffers
from accel_ckpt.saving.commit import Contribution
from accel_ckpt.saving.draft import StatePlan
from accel_ckpt.saving.writer import (
    FileLayout,
    FileRecord,
    PlannedFile,
    about_tensors,
    lay_out,
    plain_on,
    write_bytes,
    write_image,
)
from accel_ckpt.tensor_storage import compact, flat_bytes, id_tensor_storage

__all__ = ["Staging", "Stepping"]


class Stepping(Protocol):
    """What an optimizer is, of torch or of an engine: it changes these in its step, and not otherwise."""

    @property
    def param_groups(self) -> Any:
        """Dictionaries whose ``params`` are the tensors that it steps."""

    @property
    def state(self) -> Any:
        """Tree of the tensors that belong to the parameters."""


class Staging:
    """The copies of one save, laid out as the files that will be written.

    Args:
        plan: what will be written.
        optimizers: what they step, and their states, is copied by :meth:`copy`; except for files of ``torch.save``,
            which are made at once.
        buffers: where the memory comes from.
    """

    def __init__(self, plan: StatePlan, optimizers: Sequence[Stepping], buffers: HostBuffers) -> None:
        self._plan = plan
        self._buffers = buffers
        self._images: dict[str, tuple[FileImage, FileLayout]] = {}
        self._pickled: dict[str, io.BytesIO] = {}
        self._on_host: deque[tuple[torch.Tensor, FileImage, int]] = deque()
        self._streams: dict[torch.device, torch.Stream] = {}  # for what is copied while a device computes
        self._devices: set[torch.device] = set()
        self._sources: list[torch.Tensor] = []  # kept alive while a device copies them
        self._later = {id_tensor_storage(t) for o in optimizers for t in _stepped(o)}
        for file in plan.files:
            self._stage(file)
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
            _copy_on_host(*self._on_host.popleft())
        self._host_done.set()
        self._await_devices()
        self._done.set()

    def write(self, folder: Path, disk: Disk) -> Contribution:
        """Write the files and put them on the disk; after :meth:`copy`."""
        return self._plan.write(folder, disk, self._write_file)

    def release(self) -> None:
        """Discard the copies, finished or not, and wake all waiters."""
        self._on_host.clear()
        self._host_done.set()
        self._await_devices()
        self._done.set()
        self._plan = StatePlan({}, ())
        self._pickled.clear()
        while self._images:
            self._images.popitem()[1][0].release()

    def _await_devices(self) -> None:
        for event in self._events:
            event.synchronize()
        self._sources.clear()

    def _stage(self, file: PlannedFile) -> None:
        if file.metadata is None:
            self._pickled[file.name] = content = io.BytesIO()
            torch.save(compact(file.tensors), content)
            return
        layout = lay_out(about_tensors(file.tensors), file.metadata)
        pinned = any(_copies_alone(tensor.device) for tensor in file.tensors.values())
        image = FileImage(layout.size, self._buffers, pinned)
        self._images[file.name] = image, layout
        image.fill(0, layout.header)
        for name, tensor in file.tensors.items():
            later = id_tensor_storage(tensor) in self._later
            begin = layout.begin(name)
            if _copies_alone(tensor.device):
                self._copy_from_device(tensor, image, begin, later)
            elif later and tensor.device.type == "cpu":
                self._on_host.append((tensor, image, begin))
            else:
                _copy_on_host(tensor, image, begin)

    def _copy_from_device(self, tensor: torch.Tensor, image: FileImage, begin: int, later: bool) -> None:
        device = tensor.device
        if not later:
            self._devices.add(device)
        with self._side_stream(device) if later else contextlib.nullcontext():
            source = flat_bytes(plain_on(tensor, device))
            self._sources.append(source)
            for span in image.spans(begin, begin + source.numel()):
                span.copy_(source[: span.numel()], non_blocking=True)
                source = source[span.numel() :]

    def _side_stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
            self._streams[device].wait_stream(torch.accelerator.current_stream(device))
        return self._streams[device]

    def _write_file(self, file: PlannedFile, path: Path, disk: Disk) -> FileRecord:
        if file.name in self._pickled:
            return write_bytes(path, self._pickled[file.name].getbuffer(), disk)
        image, layout = self._images[file.name]
        return replace(write_image(path, image, disk), tensors=layout.entries)


def _copy_on_host(tensor: torch.Tensor, image: FileImage, begin: int) -> None:
    # By NumPy, because torch would take the training's threads for it. Between two blocks this thread asks for the
    # interpreter's lock, which training may hold.
    source = flat_bytes(plain_on(tensor, "cpu")).numpy()
    for span in image.spans(begin, begin + len(source)):
        np.copyto(span.numpy(), source[: len(span)])
        source = source[len(span) :]


def _copies_alone(device: torch.device) -> bool:
    """Whether the device copies to pinned memory while the host goes on; XLA gives a copy only when it is complete."""
    return device.type not in ("cpu", "xla")


def _stepped(optimizer: Stepping) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, and the tensors of their states."""
    yield from _tensors([group["params"] for group in optimizer.param_groups])
    yield from _tensors(optimizer.state)


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
