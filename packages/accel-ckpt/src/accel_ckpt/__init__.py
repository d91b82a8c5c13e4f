"""Checkpoints for PyTorch training that are atomic, verified and safe to load."""

from accel_state._lazy import attach
from accel_ckpt.__about__ import __version__ as __version__

__getattr__, __dir__, __all__ = attach(
    __name__,
    {},
)
