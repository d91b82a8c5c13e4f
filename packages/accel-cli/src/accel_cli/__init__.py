"""The accel command: configure, launch and inspect PyTorch training anywhere."""

from accel_cli.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
