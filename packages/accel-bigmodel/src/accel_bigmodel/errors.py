"""Exceptions of accel-bigmodel.

AccelError
└── BigModelError (RuntimeError)
    ├── DeviceMapError (ValueError)      a map misses modules, names unknown ones, or asks for what is not there
    ├── OffloadError                     something that a model whose weights wait elsewhere cannot do
    ├── QuantizationError (ValueError)   a combination of format, device and module that cannot be quantised
    ├── PipelineError (ValueError)       a model or input that cannot be cut into stages
    └── EstimateError (ValueError)       a model or configuration whose memory cannot be told
"""

from __future__ import annotations

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
    """A device map misses tensors, names modules or devices that are not there, or splits what belongs together."""


class OffloadError(BigModelError):
    """Something was asked of a dispatched model that it cannot do while its weights wait elsewhere."""


class QuantizationError(BigModelError, ValueError):
    """A combination of format, device and module cannot be quantised."""


class PipelineError(BigModelError, ValueError):
    """A model or its example inputs cannot be cut into stages."""


class EstimateError(BigModelError, ValueError):
    """A model or its configuration does not tell how much memory it needs."""
