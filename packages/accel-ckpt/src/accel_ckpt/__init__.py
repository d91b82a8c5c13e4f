"""Checkpoints for PyTorch training that are atomic, verified and safe to load."""

from accel_ckpt.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
