"""Names of dtypes that PyTorch has no single dtype for."""

from __future__ import annotations

from enum import Enum

__all__ = ["CustomDtype"]


class CustomDtype(Enum):
    """Kinds of quantised weights, for sizes and device maps (``dtype`` and ``special_dtypes``)."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
