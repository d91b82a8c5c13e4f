"""Execution devices as tensors name theirs."""

from __future__ import annotations

import torch

from accel_bigmodel.errors import DeviceMapError

__all__ = ["concrete_device"]


def concrete_device(device: torch.device | str | int) -> torch.device:
    """The device that a tensor put on ``device`` says it is on: with an index where its kind has one.

    Args:
        device: as ``Tensor.to`` takes it; a number is the index of an accelerator.

    Raises:
        DeviceMapError: there is no such device here.
    """
    try:
        wanted = torch.device(device)
        return wanted if wanted.type in ("cpu", "meta") else torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:  # the latter from a torch built without that kind
        kind = torch.accelerator.current_accelerator(check_available=True)
        here = "no accelerator" if kind is None else f"{torch.accelerator.device_count()} of type {kind.type}"
        raise DeviceMapError(
            f"the device {device!r} cannot be used: {str(error).splitlines()[0]}. This machine has the CPU and {here}"
        ) from error
