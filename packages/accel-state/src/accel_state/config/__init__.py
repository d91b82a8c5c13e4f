"""The configuration schema of a run, shared by files, environment variables, flags and code."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
