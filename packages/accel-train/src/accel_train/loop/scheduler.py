"""The learning-rate scheduler that `prepare` returns."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

if TYPE_CHECKING:
    from accel_train.loop.accumulation import Accumulator
    from accel_train.loop.optimizer import AcceleratedOptimizer
    from accel_train.loop.state import GradientState

__all__ = ["AcceleratedScheduler", "follow"]


class AcceleratedScheduler(LRScheduler):
    """A scheduler that advances when its optimizer does.

    Args:
        scheduler: the scheduler to wrap; any object with `step()` and `state_dict()`.
        optimizers: its prepared optimizers; if one of them skips its step, the scheduler does not advance.
        step_with_optimizer: False: every call of `step()` is passed on.
        split_batches: whether loaders split one batch over ranks; then one optimizer step is one scheduler step.
        steps_per_call: scheduler steps per optimizer step; by default the number of processes (or 1 with
            `split_batches`), because all processes together read that many batches of a schedule planned for one.
        advance_while_accumulating: also advance on micro-batches that do not end a window.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        steps_per_call: int | None = None,
        advance_while_accumulating: bool = False,
        accumulator: Accumulator | None = None,
    ) -> None:
        several = isinstance(optimizers, (list, tuple))
        self.optimizers: list[AcceleratedOptimizer] = list(optimizers) if several else [optimizers]  # type: ignore[list-item]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        if steps_per_call is None:
            from accel_state.world.process import PartialState

            steps_per_call = 1 if split_batches else PartialState().num_processes
        self._steps_per_call = steps_per_call
        self._advance_while_accumulating = advance_while_accumulating
        self._accumulator = accumulator
        self._fixed_length = getattr(scheduler, "total_steps", None) is not None
        self._is_accelerate_prepared = False
        self.scheduler = scheduler  # from here on its attributes are set there

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizer has stepped.

        With arguments (an epoch; a metric, for `ReduceLROnPlateau`) one call is one step, inside a window and after a
        skipped step, too, and however many processes there are. `ReduceLROnPlateau` gets the mean of the metrics of
        all ranks, so that their learning rates stay equal: call it on all ranks. Past the end of a schedule of fixed
        length (`OneCycleLR`) nothing happens.
        """
        if args or kwargs or not self.step_with_optimizer:
            self._pass_on(args, kwargs)
            return
        if self._accumulator is not None and not all(each.gradients_complete for each in self.optimizers):
            if self._advance_while_accumulating:
                with warnings.catch_warnings():
                    # torch warns that no optimizer step came first; here that is what was asked for.
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    self._advance()
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        self._advance()

    def _pass_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step with the script's arguments; a metric by which rates are chosen is the mean over ranks."""
        if self._accumulator is not None and isinstance(self.scheduler, ReduceLROnPlateau):
            if args:
                args = (self._accumulator.agreed(args[0]), *args[1:])
            elif "metrics" in kwargs:
                kwargs = {**kwargs, "metrics": self._accumulator.agreed(kwargs["metrics"])}
        self.scheduler.step(*args, **kwargs)

    def _advance(self) -> None:
        scheduler = self.scheduler
        for _ in range(self._steps_per_call):
            # OneCycleLR raises past its end, and N steps per call overshoot it unless N divides its length.
            if not self._fixed_length or scheduler.last_epoch < scheduler.total_steps:
                scheduler.step()

    @property
    def gradient_state(self) -> GradientState:
        """Where the gradient accumulation of the newest `Accelerator` stands."""
        from accel_train.loop.state import GradientState

        return GradientState()

    # The wrapped scheduler's own

    def get_last_lr(self) -> list[Any]:
        """The wrapped scheduler's last learning rates."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        """The wrapped scheduler's learning rates."""
        return list(self.scheduler.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped scheduler's `print_lr`, on versions of torch that have it."""
        self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the wrapped scheduler there, such as `base_lrs`, which it computes with."""
        inner = self.__dict__.get("scheduler")
        if inner is None or name in self.__dict__ or name not in getattr(inner, "__dict__", ()):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def follow(scheduler: Any, given: torch.optim.Optimizer, returned: torch.optim.Optimizer) -> None:
    """Point a scheduler to the optimizer by which a strategy has replaced the original one.

    The new optimizer takes over the learning rates that the scheduler has set so far, and its entries in the groups.

    Args:
        scheduler: without wrapper; schedulers that it consists of are changed as well. Others stay as they are.
        given: the optimizer that it was built with.
        returned: the optimizer that steps from now on.
    """
    found = [item for item in _with_inner(scheduler) if getattr(item, "optimizer", None) is given]
    for item in found:
        item.optimizer = returned
    if not found:
        return
    for old, new in zip(given.param_groups, returned.param_groups, strict=False):
        if new is not old:
            new.update({key: value for key, value in old.items() if key not in new or key == "lr"})
    _announce_steps(returned)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those of `SequentialLR` and `ChainedScheduler`."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


def _announce_steps(optimizer: Any) -> None:
    """Note steps at the optimizer, as schedulers do at that which they are built with.

    Without it torch warns at a scheduler's first step that the optimizer has not stepped.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        stepping = reference()
        assert stepping is not None, "its own method was called"
        stepping._opt_called = True
        return step(stepping, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted
