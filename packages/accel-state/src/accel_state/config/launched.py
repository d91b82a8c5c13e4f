"""The configuration that the launcher of this process has put into its environment."""

from __future__ import annotations

from accel_state.config import codec
from accel_state.config.launch import LaunchConfig
from accel_state.environment import snapshot

__all__ = ["launched_config"]


def launched_config() -> LaunchConfig:
    """Decode this process's environment; one call gives all options.

    Raises:
        ConfigError: a variable has an invalid value, or two variables contradict each other.
    """
    config: LaunchConfig = codec.decode(snapshot())
    return config
