"""Classes and functions of ``accelerate.utils.deepspeed``."""

from __future__ import annotations

from typing import Any

from accel_state import DistributedType
from accel_train.strategies.deepspeed.scheduler import EngineScheduler as DeepSpeedSchedulerWrapper

__all__ = ["DeepSpeedSchedulerWrapper", "get_active_deepspeed_plugin"]


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The selected plugin of an ``AcceleratorState``.

    Raises:
        ValueError: the state is not of a run with DeepSpeed.
    """
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"there is no DeepSpeed plugin: this run is of type {state.distributed_type}; "
            "launch it with --use_deepspeed, or pass deepspeed_plugin="
        )
    return state.deepspeed_plugin
