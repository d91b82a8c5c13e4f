"""Observers of the steps of a training: the guard, the progress for the launcher, garbage collection, and others.

Each of them is rare, so an `Accumulator` has one list of those in use, and a step without any asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_state.monitoring.heartbeat import BACKWARD, FORWARD, OTHER, STEP, Heartbeat

if TYPE_CHECKING:
    from accel_state.world.stop_consensus import Boundaries

__all__ = ["StepCount", "StepObserver", "StepReporter"]


class StepObserver:
    """Sees backward passes and steps; a subclass overrides what it needs. They are called in the order of the list.

    Optimizers are the prepared ones, but for `check_optimizer`.
    """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the script is about to be prepared; raises if its steps cannot be observed."""

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """`Accelerator.backward` begins, with these arguments."""

    def after_backward(self) -> None:
        """`Accelerator.backward` has ended."""

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Complete gradients were clipped; `norm` is theirs before."""

    def logged(self, values: Mapping[str, Any]) -> None:
        """`Accelerator.log` is given values."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, with complete gradients; may end the script instead."""

    def decide(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, together: bool
    ) -> bool | None:
        """Whether the optimizer has stepped, although its strategy is not asked to step; None: the strategy steps.

        Args:
            optimizer: about to step.
            closure: given to `step()`.
            together: all ranks take this step.
        """
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or skipped the step; its gradients are still there."""

    def forget(self) -> None:
        """The prepared objects are released."""


class StepReporter(StepObserver):
    """Tells the launcher in which phase of a step this rank is.

    Args:
        pulse: the rank's record.
    """

    def __init__(self, pulse: Heartbeat) -> None:
        self._pulse = pulse
        self._before = OTHER

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """Backward includes the wait for the gradients of other ranks."""
        self._pulse.enter(BACKWARD)

    def after_backward(self) -> None:
        """Backward has ended; the following code is not a phase of its own."""
        self._pulse.enter(OTHER)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is a phase."""
        self._before = self._pulse.enter(STEP)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The phase before goes on; the forward that led to the step is over."""
        self._pulse.stepped(OTHER if self._before == FORWARD else self._before)

    def __reduce__(self) -> tuple[type[StepObserver], tuple[()]]:
        return StepObserver, ()  # another process has a record of its own, or none


class StepCount(StepObserver):
    """Counts steps for the decision at which of them all ranks stop.

    Args:
        boundaries: have the count.
    """

    def __init__(self, boundaries: Boundaries) -> None:
        self.boundaries = boundaries

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A skipped step counts as well."""
        self.boundaries.passed += 1
