"""Run PyTorch models larger than device or host memory, straight from their checkpoint files."""

from accel_bigmodel.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
