"""The devices of this machine, as ``accelerate.test_utils`` names them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """The accelerator's type or "cpu", its count (CPU: 1), and a function for the bytes in use on a device."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "cpu", 1, lambda: 0
    return kind.type, torch.accelerator.device_count(), lambda: int(torch.accelerator.memory_allocated())


torch_device, device_count, memory_allocated_func = get_backend()
