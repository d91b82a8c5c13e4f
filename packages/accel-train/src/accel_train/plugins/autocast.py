"""Options of autocast."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.handlers import KwargsHandler

__all__ = ["AutocastKwargs"]


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast` for prepared models.

    Attributes:
        enabled: whether prepared models run under autocast.
        cache_enabled: whether autocast reuses cast weights within one forward; None: torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
