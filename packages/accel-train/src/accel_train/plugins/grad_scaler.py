"""Options of the gradient scaler."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.handlers import KwargsHandler

__all__ = ["GradScalerKwargs"]


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`, under its names and with its defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
