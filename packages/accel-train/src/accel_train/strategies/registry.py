"""Strategies by name; other packages add theirs through the entry-point group `accel_train.strategies`."""

from __future__ import annotations

from accel_state.registry import Registry
from accel_train.errors import OptionError
from accel_train.strategies.base import Strategy

__all__ = ["STRATEGIES"]

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    "accel_train.strategies",
    {
        "single": "accel_train.strategies.base:Strategy",
        "ddp": "accel_train.strategies.ddp:DDPStrategy",
        "deepspeed": "accel_train.strategies.deepspeed.strategy:DeepSpeedStrategy",
        "fsdp2": "accel_train.strategies.fsdp2.strategy:FSDP2Strategy",
        "pp": "accel_train.strategies.pipeline.strategy:PipelineStrategy",
        "tp": "accel_train.strategies.tensor_parallel:TensorParallelStrategy",
        "xla": "accel_train.strategies.xla:XlaStrategy",
    },
    error=OptionError,
)
