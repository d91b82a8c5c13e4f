"""The placement axis: where a module's tensors and the batches live."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

__all__ = ["Placement"]


class Placement:
    """Null object of the axis: everything stays where the user put it."""

    name: ClassVar[str] = "as_is"

    #: Device that batches and optimizer states move to; None leaves them where they are.
    device: torch.device | None = None

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move a model to its place; parameters keep their identity."""
        return model
