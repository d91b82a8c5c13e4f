"""Run PyTorch models that do not fit the device, from the checkpoint files as they are."""

from accel_bigmodel.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_bigmodel.errors": [
            "BigModelError",
            "DeviceMapError",
            "OffloadError",
            "PipelineError",
            "QuantizationError",
        ],
    },
)
