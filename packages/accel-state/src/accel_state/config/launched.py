"""The configuration that the launcher of this process has put into its environment."""

from __future__ import annotations

from typing import TypeVar

from accel_state.config import codec
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.environment import snapshot

__all__ = ["launched_config", "launched_section"]

S = TypeVar("S", bound=Section)


def launched_config() -> LaunchConfig:
    """Decode this process's environment; one call gives all options.

    Raises:
        ConfigError: a variable has an invalid value, or two variables contradict each other.
    """
    config: LaunchConfig = codec.decode(snapshot())
    return config


def launched_section(section: type[S]) -> S:
    """Decode one section alone, whether or not the run uses it.

    Raises:
        ConfigError: a variable of the section has an invalid value.
    """
    found: S = codec.decode(snapshot(), section)
    return found
