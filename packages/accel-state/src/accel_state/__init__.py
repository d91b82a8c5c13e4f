"""Environment, devices, processes, collectives, configuration schema and launching for PyTorch programs."""

from accel_state.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
