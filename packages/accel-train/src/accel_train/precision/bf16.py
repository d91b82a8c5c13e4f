"""bfloat16 under autocast; its range equals float32's, so gradients need no scaling."""

from __future__ import annotations

from typing import ClassVar

import torch

from accel_train.precision.autocast import AutocastPrecision

__all__ = ["BF16Precision"]


class BF16Precision(AutocastPrecision):
    """Autocast in bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype | None] = torch.bfloat16
    tolerance: ClassVar[float] = 2e-2
