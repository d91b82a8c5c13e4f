"""Moving batches to the device, and doing so while the previous batch is computed on."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from accel_state.trees import recursively_apply, send_to_device

__all__ = ["BatchTransfer", "DirectTransfer", "StreamTransfer", "choose_transfer"]


class DirectTransfer:
    """Move a batch when it is returned.

    Args:
        device: where to.
        non_blocking: copy asynchronously; requires pinned memory.
    """

    def __init__(self, device: torch.device, non_blocking: bool = False) -> None:
        self._device = device
        self._non_blocking = non_blocking

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        return send_to_device(batch, self._device, self._non_blocking)


class StreamTransfer:
    """Copy on a separate stream, from pinned memory; the computing stream waits for the copy, the host
    does not.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def move(self, batch: Any) -> Any:
        """The batch on the device, where nothing was begun ahead."""
        return self.finish(self.start(batch))

    def start(self, batch: Any) -> tuple[Any, Any, torch.Event]:
        """Pin what is not pinned yet and begin to copy."""
        pinned = recursively_apply(_pin, batch)
        with self._stream:
            moved = send_to_device(pinned, self._device, non_blocking=True)
            done = torch.Event(self._device)
            done.record(self._stream)
        # The pinned source lives until the copy is done; its memory may be reused only then.
        return moved, pinned, done

    def finish(self, ticket: tuple[Any, Any, torch.Event]) -> Any:
        """The moved batch; the current stream waits for the copy."""
        moved, _, done = ticket
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(done)
        recursively_apply(lambda leaf: _used_by(leaf, current), moved)
        return moved


def _pin(leaf: Tensor) -> Tensor:
    if leaf.device.type != "cpu" or leaf.is_pinned():
        return leaf
    return leaf.pin_memory()


def _used_by(leaf: Tensor, stream: torch.Stream) -> Tensor:
    if leaf.device.type != "cpu":
        leaf.record_stream(stream)
    return leaf


BatchTransfer: TypeAlias = DirectTransfer | StreamTransfer


def choose_transfer(
    device: torch.device | None, *, non_blocking: bool, background_workers: bool
) -> BatchTransfer | None:
    """Choose how a loader's batches are copied to `device`; None if they are not moved.

    The next batch is fetched ahead only when worker processes load: fetching ahead in this process would
    change the order in which the dataset and the training step draw random numbers.
    """
    if device is None or (device.type == "cpu" and not torch.accelerator.is_available()):
        return None  # without an accelerator there is no other place that a batch could be in
    if device.type == "cpu" or not background_workers or not _has_streams(device):
        return DirectTransfer(device, non_blocking)
    return StreamTransfer(device)


def _has_streams(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and current.type == device.type and device.type != "mps"
