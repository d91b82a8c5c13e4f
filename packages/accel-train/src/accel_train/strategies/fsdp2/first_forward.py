"""Support for a first forward under `torch.inference_mode()`, such as an evaluation before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_ckpt.parts import fsdp_modules

__all__ = ["allow_inference_first"]


def allow_inference_first(model: nn.Module) -> None:
    """Allow a divided model to run its first forward under `torch.inference_mode()`.

    FSDP2 allocates the memory for gathered parameters when they are first gathered. If that happened under inference
    mode, the memory could not be filled outside of it later. The hook costs nothing after the first forward.
    """
    handles: list[Any] = []

    def gather_once(module: nn.Module, inputs: Any) -> None:
        for handle in handles:
            handle.remove()
        if not torch.is_inference_mode_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            for unit in fsdp_modules(module):
                unit.unshard()
                unit.reshard()

    handles.append(model.register_forward_pre_hook(gather_once, prepend=True))
