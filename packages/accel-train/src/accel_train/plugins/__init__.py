"""Options that users pass to `Accelerator` as objects: plugins, configurations and keyword-argument handlers.

A *plugin* is a frozen subclass of a section of the launch configuration. A *configuration* may be changed between two
calls of `prepare`. A *handler* holds keyword arguments for one PyTorch object, which the `Accelerator` creates when it
is constructed.
"""

from accel_train.plugins.accumulation import GradientAccumulationPlugin
from accel_train.plugins.autocast import AutocastKwargs
from accel_train.plugins.base import SectionPlugin, StrategyPlugin
from accel_train.plugins.data_loader import DataLoaderConfiguration
from accel_train.plugins.ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from accel_train.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
from accel_train.plugins.deepspeed_config import HfDeepSpeedConfig
from accel_train.plugins.dynamo import TorchDynamoPlugin
from accel_train.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_train.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_train.plugins.grad_scaler import GradScalerKwargs
from accel_train.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_train.plugins.profiler import ProfileKwargs
from accel_train.plugins.project import ProjectConfiguration
from accel_train.plugins.tensor_parallel import TorchTensorParallelPlugin
from accel_train.plugins.xla import XlaPlugin

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedPlugins",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HfDeepSpeedConfig",
    "MSAMPRecipeKwargs",
    "ParallelismConfig",
    "PipelineParallelConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "SectionPlugin",
    "StrategyPlugin",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "XlaPlugin",
]


def __getattr__(name: str) -> object:
    """The plugin of an installed strategy, by the name of its class."""
    from accel_state.config.strategies import installed_strategies
    from accel_state.entry_points import load

    for strategy in installed_strategies():
        if strategy.plugin.rpartition(":")[2] == name:
            return load(strategy.plugin)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
