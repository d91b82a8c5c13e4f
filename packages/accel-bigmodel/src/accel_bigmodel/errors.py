"""Exceptions of accel-bigmodel.

AccelError
└── BigModelError (RuntimeError)
    ├── DeviceMapError (ValueError)     a map misses modules, names unknown ones, or uses a missing device
    ├── OffloadError                    an operation that a model with offloaded weights does not support
    ├── QuantizationError (ValueError)  a combination of format, device and module that cannot be quantised
    ├── PipelineError (ValueError)      a model or input that cannot be split into stages
    └── EstimateError (ValueError)      a model or configuration whose memory cannot be estimated
"""

from __future__ import annotations

from typing import ClassVar

from accel_state.errors import AccelError

__all__ = [
    "BigModelError",
    "DeviceMapError",
    "EstimateError",
    "OffloadError",
    "PipelineError",
    "QuantizationError",
]


class BigModelError(AccelError, RuntimeError):
    """Root of the errors about big models."""


class DeviceMapError(BigModelError, ValueError):
    """A device map misses tensors, names modules or devices that do not exist, or splits tied weights."""


class OffloadError(BigModelError):
    """A dispatched model does not support an operation while its weights are offloaded."""


class QuantizationError(BigModelError, ValueError):
    """A combination of format, device and module cannot be quantised."""


class PipelineError(BigModelError, ValueError):
    """A model or its example inputs cannot be split into stages."""


class EstimateError(BigModelError, ValueError):
    """The memory that a model needs cannot be estimated from it or its configuration."""

    exit_code: ClassVar[int] = 2
