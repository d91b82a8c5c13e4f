"""Staging: copies of what a save will write, so that training can continue while they are written.

All of it is copied before :class:`Staging` returns. Nothing less holds the values of the call: between two steps a
script may change any tensor by ways that nobody can observe (``.data``, NumPy views, other threads and streams).
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

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
from accel_ckpt.tensor_storage import compact, flat_bytes

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
        for file in plan.files:
            self._stage(file)
        buffers.clear()
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
            torch.save(compact(file.tensors), content)
            return
        layout = lay_out(about_tensors(file.tensors), file.metadata)
        pinned = any(_copies_alone(tensor.device) for tensor in file.tensors.values())
        image = FileImage(layout.size, self._buffers, pinned)
        self._images[file.name] = image, layout
        image.fill(0, layout.header)
        for name, tensor in file.tensors.items():
            alone = _copies_alone(tensor.device)
            source = flat_bytes(plain_on(tensor, tensor.device if alone else "cpu"))
            if alone:
                self._copying.setdefault(tensor.device, []).append(source)
            begin = layout.begin(name)
            # By torch and its threads: training has no use for them meanwhile, and one core alone takes twice as long.
            for span in image.spans(begin, begin + source.numel()):
                span.copy_(source[: span.numel()], non_blocking=alone)
                source = source[span.numel() :]

    def _write_file(self, file: PlannedFile, path: Path, disk: Disk) -> FileRecord:
        if file.name in self._pickled:
            return write_bytes(path, self._pickled[file.name].getbuffer(), disk)
        image, layout = self._images[file.name]
        return replace(write_image(path, image, disk), tensors=layout.entries)


def _copies_alone(device: torch.device) -> bool:
    """Whether the device copies to pinned memory while the host goes on; XLA gives a copy only when it is complete."""
    return device.type not in ("cpu", "xla")
