"""The plugins of strategies that a launcher can select."""

from __future__ import annotations

from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_train.plugins.deepspeed import DeepSpeedPlugin
from accel_train.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_train.plugins.megatron_lm import MegatronLMPlugin
from accel_train.plugins.parallelism import ParallelismConfig

__all__ = ["launched_parallelism", "launched_plugin", "launched_plugin_type"]

# By the value of `distributed_type` that selects them; each is built from its section.
_PLUGINS: dict[str, Any] = {
    "DEEPSPEED": DeepSpeedPlugin,
    "FSDP": FullyShardedDataParallelPlugin,
    "MEGATRON_LM": MegatronLMPlugin,
}


def launched_plugin_type(launched: LaunchConfig) -> Any:
    """The class of the plugin of the strategy that the launcher asks for; None: it leaves the choice open."""
    return _PLUGINS.get(launched.distributed_type or "")


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
