"""The plugins of strategies that a launcher can select."""

from __future__ import annotations

from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.entry_points import load
from accel_train.plugins.deepspeed import DeepSpeedPlugin
from accel_train.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_train.plugins.parallelism import ParallelismConfig

__all__ = ["launched_parallelism", "launched_plugin", "launched_plugin_type"]


def launched_plugin_type(launched: LaunchConfig) -> Any:
    """The plugin class of the strategy that the launcher selects; None if it selects none."""
    if launched.use_deepspeed:
        return DeepSpeedPlugin
    if launched.use_fsdp:
        return FullyShardedDataParallelPlugin
    return None if launched.strategy is None else load(launched.strategy.plugin)


def launched_plugin(launched: LaunchConfig) -> Any:
    """The plugin of the strategy that the launcher selects, with its options; None if it selects none.

    Raises:
        OptionError: the plugin cannot use a value of its section.
    """
    plugin = launched_plugin_type(launched)
    return None if plugin is None else plugin.from_section(getattr(launched, plugin.section))


def launched_parallelism(launched: LaunchConfig) -> ParallelismConfig | None:
    """The degrees of parallelism that the launcher sets; None if it sets none.

    Raises:
        OptionError: a value of its section cannot be used.
    """
    if not launched.use_parallelism_config:
        return None
    return ParallelismConfig.from_section(launched.parallelism)
