"""Execution devices with an index, as tensors report them."""

from __future__ import annotations

import torch

from accel_bigmodel.errors import DeviceMapError
from accel_state.messages import first_line

__all__ = ["concrete_device"]


def concrete_device(device: torch.device | str | int) -> torch.device:
    """The device that a tensor on ``device`` reports: with an index where its type has one.

    Args:
        device: as for ``Tensor.to``; a number is the index of an accelerator.

    Raises:
        DeviceMapError: this machine has no such device.
    """
    try:
        wanted = torch.device(device)
        return wanted if wanted.type in ("cpu", "meta") else torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:  # AssertionError from a torch built without that type
        kind = torch.accelerator.current_accelerator(check_available=True)
        here = "no accelerator" if kind is None else f"{torch.accelerator.device_count()} of type {kind.type}"
        raise DeviceMapError(
            f"the device {device!r} cannot be used: {first_line(error)}. This machine has the CPU and {here}"
        ) from error
