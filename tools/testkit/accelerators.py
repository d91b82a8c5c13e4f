"""What tests of any accelerator need, real or simulated."""

from __future__ import annotations

import torch

__all__ = ["keep_busy", "this_accelerator"]


def this_accelerator() -> torch.device:
    """The accelerator of this machine, with the index of its current device.

    Raises:
        RuntimeError: there is none.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise RuntimeError("torch.accelerator finds no accelerator here")
    return torch.device(device.type, torch.accelerator.current_device_index())


def keep_busy(milliseconds: float) -> None:
    """Queue work on the current stream that takes about this long."""
    device = this_accelerator()
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 2_000_000))  # cycles
        return
    x = torch.ones(400, 400, device=device)
    for _ in range(max(1, round(milliseconds / 4))):
        x = x @ x / 400
