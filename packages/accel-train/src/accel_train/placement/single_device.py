"""Everything on one device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from accel_train.errors import PrepareError
from accel_train.placement.base import Placement

__all__ = ["SingleDevicePlacement"]


class SingleDevicePlacement(Placement):
    """Models, optimizer states and batches go to one device.

    Args:
        device: that device.
    """

    name: ClassVar[str] = "device"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move the model, unless a device map already spread it.

        Raises:
            PrepareError: parameters without storage, which no `.to()` can fill.
        """
        device_map = getattr(model, "hf_device_map", None)
        if device_map is not None and len(set(device_map.values())) > 1:
            return model
        meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if meta:
            raise PrepareError(
                f"Parameter {meta[0]!r} (of {len(meta)}) is on the meta device and has no values to move to "
                f"{self.device}. Load a checkpoint first (load_checkpoint_in_model), or build the model without "
                "init_empty_weights()."
            )
        return model.to(self.device)
