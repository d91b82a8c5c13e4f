"""Precisions by name; other packages add theirs through the entry-point group `accel_train.precision`."""

from __future__ import annotations

from accel_state.registry import Registry
from accel_train.errors import OptionError
from accel_train.precision.base import Precision

__all__ = ["PRECISIONS"]

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision",
    "accel_train.precision",
    {
        "no": "accel_train.precision.base:Precision",
        "bf16": "accel_train.precision.bf16:BF16Precision",
        "fp16": "accel_train.precision.fp16:FP16Precision",
        "fp8": "accel_train.precision.fp8.precision:FP8Precision",
    },
    error=OptionError,
)
