"""Devices as a user names them in a device map, checked against this machine."""

from __future__ import annotations

import torch

from accel_state.errors import AccelError, DeviceError
from accel_state.host.devices import default_device, device_count

__all__ = ["existing_device", "parse_device"]

AnyDevice = int | str | torch.device


def parse_device(
    device: AnyDevice, subject: str = "the device is", *, error: type[AccelError] = DeviceError
) -> torch.device:
    """The device that a user means; it need not exist.

    Args:
        device: as ``torch.device`` takes it. A number is the index of an accelerator, of type CUDA where this machine
            has none.
        subject: how the error begins, before the device.
        error: class of the error.

    Raises:
        DeviceError: it is not a device; ``error`` in place of this class.
    """
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            kind = default_device().type
            return torch.device("cuda" if kind == "cpu" else kind, device)
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise error(
            f"{subject} {device!r}, which is not a device; give the index of an accelerator, or a device such as 'cpu' "
            "or 'cuda:0'"
        ) from None


def existing_device(
    device: AnyDevice, subject: str = "the device is", *, error: type[AccelError] = DeviceError
) -> torch.device:
    """The device that a user means, which exists on this machine; the meta device does.

    Args:
        device: as for :func:`parse_device`, and so the others.
        subject: how the error begins.
        error: class of the error.

    Raises:
        DeviceError: it is not a device, or this machine does not have it; ``error`` in place of this class.
    """
    found = parse_device(device, subject, error=error)
    if found.type in ("cpu", "meta"):
        return found
    count = device_count(found.type)
    if (found.index or 0) >= count:
        here = f"has {count} of type {found.type}" if count else f"has no {found.type} device"
        raise error(
            f"{subject} {device!r}, but this machine {here}; use 'cpu', or a device that torch.accelerator finds"
        )
    return found
