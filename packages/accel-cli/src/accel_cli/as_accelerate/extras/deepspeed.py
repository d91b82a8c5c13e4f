"""Classes and functions of ``accelerate.utils.deepspeed``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel_state import DistributedType
from accel_train import AcceleratedOptimizer, AcceleratorState
from accel_train.loop.state import is_initialized
from accel_train.strategies.deepspeed.scheduler import EngineScheduler

DeepSpeedSchedulerWrapper = EngineScheduler


class DeepSpeedEngineWrapper:
    """Backward and step of an engine in one call, for scripts that make a wrapper of their own engine.

    Args:
        engine: a ``deepspeed.DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step if they are complete.

        Args:
            loss: a scalar.
            sync_gradients: whether this is the last micro-batch of its window.
            **kwargs: options of the engine's ``backward``.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last step; None before it."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class _PreparedByDeepSpeed(type):
    """Answers ``isinstance(optimizer, DeepSpeedOptimizerWrapper)``.

    A prepared optimizer has one class under every strategy here; with DeepSpeed it steps with the engine.
    """

    def __instancecheck__(cls, item: Any) -> bool:
        if type.__instancecheck__(cls, item):
            return True
        is_prepared = isinstance(item, AcceleratedOptimizer) and is_initialized()
        return is_prepared and AcceleratorState().distributed_type == DistributedType.DEEPSPEED


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer, metaclass=_PreparedByDeepSpeed):
    """The optimizer of an engine, for scripts that wrap their own engine, which steps and clears gradients itself.

    Args:
        optimizer: the engine's ``optimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Any = None) -> Any:
        """Do nothing: the engine steps in ``DeepSpeedEngineWrapper.backward``."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients when it steps."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients overflowed at the engine's last step."""
        return bool(getattr(self.optimizer, "overflow", False))


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
