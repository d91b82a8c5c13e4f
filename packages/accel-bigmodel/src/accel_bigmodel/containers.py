"""Modules that are never called, such as ``nn.ModuleList``: their parent uses what they hold."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["is_container"]


def is_container(module: nn.Module) -> bool:
    """Whether the module is only a container: its parent uses its tensors and children."""
    # Classes of torch.jit have no ``forward`` attribute.
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is nn.Module.forward
