"""Staging: copies of what a save will write, so that training can continue while they are written.

All of it is copied before :class:`Staging` returns. Nothing less holds the values of the call: between two steps a
script may change any tensor in ways that cannot be observed (``.data``, NumPy views, other threads and streams).

Cheaper ways that were tried and rejected: hooks of optimizers see only the steps of known optimizers; version counters
miss writes through ``.data`` and NumPy; a dispatch mode sees one thread and slows every operation down; a forked child
costs a page fault for every page that training changes, which is more than the copy, and does not hold shared memory or
devices.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_ckpt.disk import Disk
from accel_ckpt.folders.folder import Contribution
from accel_ckpt.format.memory import FileImage, HostBuffers
from accel_ckpt.format.writer import (
    FileLayout,
    FileRecord,
    PlannedFile,
    about_tensors,
    lay_out,
    plain_on,
    write_bytes,
    write_image,
)
from accel_ckpt.saving.draft import StatePlan
from accel_ckpt.tensor_storage import flat_bytes

__all__ = ["Staging"]


class Staging:
    """The copies of one save, complete, laid out as the files that will be written.

    Args:
        plan: what will be written.
        buffers: where the memory comes from.
    """

    def __init__(self, plan: StatePlan, buffers: HostBuffers) -> None:
        self._plan = plan
        self._buffers = buffers
        self._images: dict[str, tuple[FileImage, FileLayout]] = {}
        self._pickled: dict[str, io.BytesIO] = {}
        self._copying: dict[torch.device, list[torch.Tensor]] = {}  # kept alive while a device copies them
        self._on_host: deque[tuple[Any, Any]] = deque()  # arrays: where to, and from
        for file in plan.files:
            self._stage(file)
        buffers.clear()
        self._copy_on_host()
        while self._copying:
            device, _ = self._copying.popitem()
            torch.accelerator.current_stream(device).synchronize()

    def write(self, folder: Path, disk: Disk) -> Contribution:
        """Write the files and put them on the disk."""
        return self._plan.write(folder, disk, self._write_file)

    def release(self) -> None:
        """Discard the copies."""
        self._plan = StatePlan({}, ())
        self._pickled.clear()
        while self._images:
            self._images.popitem()[1][0].release()

    def _stage(self, file: PlannedFile) -> None:
        if file.metadata is None:
            self._pickled[file.name] = content = io.BytesIO()
            torch.save(file.content(), content)
            return
        layout = lay_out(about_tensors(file.tensors), file.metadata)
        pinned = any(_copies_alone(tensor.device) for tensor in file.tensors.values())
        image = FileImage(layout.size, self._buffers, pinned)
        self._images[file.name] = image, layout
        image.fill(0, layout.header)
        for name, tensor in file.tensors.items():
            self._copy(tensor, image, layout.begin(name))

    def _copy(self, tensor: torch.Tensor, image: FileImage, begin: int) -> None:
        alone = _copies_alone(tensor.device)
        source = flat_bytes(plain_on(tensor, tensor.device if alone else "cpu"))
        spans = image.spans(begin, begin + source.numel())
        if alone:
            self._copying.setdefault(tensor.device, []).append(source)
            for span, part in _paired(spans, source):
                span.copy_(part, non_blocking=True)
            return
        pairs = ((span.numpy(), part.numpy()) for span, part in _paired(spans, source))
        if source.data_ptr() == tensor.data_ptr():
            self._on_host += pairs
        else:  # a temporary copy, which goes before the next is made
            for pair in pairs:
                np.copyto(*pair)

    def _copy_on_host(self) -> None:
        """Make the copies, by as many threads as torch has here: one core alone takes twice as long as two.

        By NumPy, because threads that share a list of pieces end together also where other work keeps cores busy;
        torch divides every single piece and waits for the slowest thread each time.
        """
        helpers = min(torch.get_num_threads(), len(self._on_host)) - 1
        if helpers < 1:
            self._copy_pieces()
            return
        with ThreadPoolExecutor(helpers, "accel-copy") as pool:
            others = [pool.submit(self._copy_pieces) for _ in range(helpers)]
            self._copy_pieces()
        for other in others:
            other.result()

    def _copy_pieces(self) -> None:
        while True:
            try:
                target, source = self._on_host.popleft()
            except IndexError:
                return
            np.copyto(target, source)

    def _write_file(self, file: PlannedFile, path: Path, disk: Disk) -> FileRecord:
        if file.name in self._pickled:
            return write_bytes(path, self._pickled[file.name].getbuffer(), disk)
        image, layout = self._images[file.name]
        return replace(write_image(path, image, disk), header=len(layout.header))


def _paired(
    spans: Iterator[torch.Tensor], source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of an image, and what belongs there."""
    for span in spans:
        yield span, source[: span.numel()]
        source = source[span.numel() :]


def _copies_alone(device: torch.device) -> bool:
    """Whether the device copies to pinned memory while the host goes on; XLA gives a copy only when it is complete."""
    return device.type not in ("cpu", "xla")
