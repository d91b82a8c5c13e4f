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
    """The class of the plugin of the strategy that the launcher asks for; None: it leaves the choice open."""
    if launched.use_deepspeed:
        return DeepSpeedPlugin
    if launched.use_fsdp:
        return FullyShardedDataParallelPlugin
    return None if launched.strategy is None else load(launched.strategy.plugin)


def launched_plugin(launched: LaunchConfig) -> Any:
    """The plugin of the strategy that the launcher asks for, with its options; None: it leaves the choice open.

    Raises:
        OptionError: a value of its section that the plugin cannot use.
    """
    plugin = launched_plugin_type(launched)
    return None if plugin is None else plugin.from_section(getattr(launched, plugin.section))


def launched_parallelism(launched: LaunchConfig) -> ParallelismConfig | None:
    """The degrees that the launcher asks for; None: it asks for none.

    Raises:
        OptionError: a value of its section that cannot be used.
    """
    if not launched.use_parallelism_config:
        return None
    return ParallelismConfig.from_section(launched.parallelism)
