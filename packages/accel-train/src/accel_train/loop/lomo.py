"""LOMO and AdaLomo (lomo-optim), which update parameters during backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_train.errors import AccumulationError, IncompatibleOptionsError, OptionError
from accel_train.loop.observers import StepObserver

__all__ = [
    "check_arguments",
    "check_guarded",
    "check_lomo",
    "fused_backward",
    "is_lomo",
    "observe",
    "save_moments",
]

_KEY = "lomo"
_MOMENTS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "has_overflow_serial")


def is_lomo(optimizer: object) -> bool:
    """Whether it is an optimizer of lomo-optim; asked by name, so that nothing is imported."""
    if "lomo_optim" not in sys.modules:
        return False
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)


def check_guarded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to guard the steps of an optimizer of lomo-optim, whose updates cannot be left out.

    Raises:
        IncompatibleOptionsError: it is one.
    """
    if is_lomo(optimizer):
        raise IncompatibleOptionsError(
            f"guard_steps() skips updates, but {type(optimizer).__name__} updates during backward, before its "
            "gradients can be checked. Use an optimizer that updates in step()."
        )


def check_lomo(optimizer: torch.optim.Optimizer, *, ranks: int, strategy: str, scaled: bool) -> None:
    """Refuse what would train something else without an error.

    Args:
        optimizer: of lomo-optim.
        ranks: whose gradients would be averaged.
        strategy: name of the strategy.
        scaled: a gradient scaler scales losses.

    Raises:
        IncompatibleOptionsError: gradients are used before they are averaged or unscaled.
    """
    name = type(optimizer).__name__
    if ranks > 1:
        raise IncompatibleOptionsError(
            f"{name} updates parameters during backward, before the strategy {strategy!r} has averaged their gradients "
            f"over {ranks} ranks, so each rank would train a different model. Start one process, or use another "
            "optimizer."
        )
    if scaled:
        raise IncompatibleOptionsError(
            f"{name} updates parameters during backward, where the gradient scaler of mixed_precision='fp16' has not "
            "unscaled their gradients. Use mixed_precision='bf16'."
        )


class _LomoSteps(StepObserver):
    """Leaves out steps of optimizers of lomo-optim, whose backward has stepped, and backward passes that do not."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """Refuse a backward without a learning rate, which would update nothing."""
        if self.optimizers:
            check_arguments(num_items, kwargs)
            fused_backward(self.optimizers, loss, None, 1)

    def decide(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, together: bool
    ) -> bool | None:
        """Whether backward has stepped."""
        own = getattr(optimizer, "optimizer", optimizer)
        return True if any(own is known for known in self.optimizers) else None

    def forget(self) -> None:
        """Forget the optimizers."""
        self.optimizers.clear()


def observe(observers: list[StepObserver], optimizer: torch.optim.Optimizer) -> None:
    """Observe the steps of an optimizer of lomo-optim."""
    steps = next((item for item in observers if isinstance(item, _LomoSteps)), None)
    if steps is None:
        steps = _LomoSteps()
        observers.append(steps)
    steps.optimizers.append(optimizer)


def check_arguments(num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of `Accelerator.backward` that a backward which updates parameters cannot take.

    Raises:
        IncompatibleOptionsError: there are some.
    """
    if num_items is not None or kwargs:
        given = [*kwargs] if num_items is None else ["num_items", *kwargs]
        raise IncompatibleOptionsError(
            "backward() with an optimizer of lomo-optim takes a loss and a learning rate, got "
            f"{', '.join(given)}. Leave the others out."
        )


def fused_backward(
    optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, learning_rate: float | None, num_steps: int
) -> None:
    """Backward that updates parameters.

    Args:
        optimizers: all prepared ones, without wrappers.
        loss: a scalar.
        learning_rate: of this update.
        num_steps: micro-batches per optimizer step.

    Raises:
        OptionError: there is no learning rate, or not exactly one optimizer of lomo-optim.
        AccumulationError: gradients are to be accumulated, which an update during backward cannot.
    """
    found: list[Any] = [optimizer for optimizer in optimizers if is_lomo(optimizer)]
    if len(found) != 1:
        raise OptionError(
            "backward(learning_rate=…) needs exactly one prepared optimizer of lomo-optim, but there are "
            f"{len(found)}. Pass Lomo or AdaLomo to prepare(), or leave learning_rate out."
        )
    if learning_rate is None:
        raise OptionError(
            f"{type(found[0]).__name__} updates parameters during backward, so pass the learning rate there: "
            "accelerator.backward(loss, learning_rate=…)."
        )
    if num_steps > 1:
        raise AccumulationError(
            f"{type(found[0]).__name__} updates parameters in every backward, so gradients cannot be accumulated over "
            f"{num_steps} micro-batches. Use gradient_accumulation_steps=1."
        )
    found[0].fused_backward(loss, learning_rate)


def save_moments(optimizer: Any) -> None:
    """Make state dicts of an optimizer of lomo-optim hold what it keeps outside of `state`."""

    def add(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _KEY: dict(_own_state(optimizer))}

    def take(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        _restore(optimizer, state.get(_KEY, {}))
        return {key: value for key, value in state.items() if key != _KEY}

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


def _own_state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(optimizer, "step_num"):
        yield "step_num", optimizer.step_num
    for name in _MOMENTS:
        if hasattr(optimizer, name):
            yield name, dict(getattr(optimizer, name))
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None:
        yield "loss_scaler", {name: getattr(scaler, name) for name in _SCALER}


def _restore(optimizer: Any, saved: dict[str, Any]) -> None:
    if "step_num" in saved:
        optimizer.step_num = saved["step_num"]
    for name in _MOMENTS:
        for key, value in saved.get(name, {}).items():
            getattr(optimizer, name)[key].copy_(value)
    if "loss_scaler" in saved:
        if optimizer.loss_scaler is None:
            kind = sys.modules[type(optimizer).__module__].DynamicLossScaler
            optimizer.loss_scaler, optimizer.first_backward = kind(**optimizer.loss_scale_args), False
        for name, value in saved["loss_scaler"].items():
            setattr(optimizer.loss_scaler, name, value)
