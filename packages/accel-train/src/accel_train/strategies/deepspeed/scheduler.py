"""The scheduler of a DeepSpeed configuration, which the engine steps."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["EngineScheduler"]


class EngineScheduler(LRScheduler):
    """The engine's own scheduler, which `prepare()` returns for a `DummyScheduler`; it steps with the engine.

    Args:
        scheduler: the engine's scheduler.
        optimizers: not used; for scripts that build the wrapper by hand.
    """

    def __init__(self, scheduler: Any, optimizers: Any = None) -> None:
        # LRScheduler's own constructor would change learning rates.
        self.scheduler = scheduler

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the engine has stepped the scheduler."""

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the groups."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """The learning rates of the groups."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The engine's scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the engine's scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
