"""Names of quantised formats that have no dtype in PyTorch."""

from __future__ import annotations

from enum import Enum

__all__ = ["CustomDtype"]


class CustomDtype(Enum):
    """Formats of quantised weights, for sizes and device maps (``dtype`` and ``special_dtypes``)."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
