"""Gradient clipping: only complete, unscaled gradients are clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from accel_train.errors import ArgumentTypeError, PrepareError
from accel_train.loop.observers import StepObserver
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.optimizer_parameters import parameters_of
from accel_train.strategies.base import Strategy

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


def clip_grad_norm_(
    strategy: Strategy,
    optimizers: Sequence[AcceleratedOptimizer],
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float,
    *,
    are_complete: Callable[[Sequence[Tensor]], bool],
    observers: Iterable[StepObserver] = (),
) -> Tensor:
    """See `Accelerator.clip_grad_norm_`; inside an accumulation window gradients are not complete."""
    chosen = strategy.gathered.parts_of(_listed(parameters))
    if not are_complete(chosen):
        return strategy.gradient_norm(chosen, norm_type) / strategy.precision.loss_scale
    _unscale_owners(strategy, optimizers, chosen)
    norm = strategy.clip_grad_norm_(chosen, max_norm, norm_type)
    for observer in observers:
        observer.clipped(chosen, norm)
    return norm


def clip_grad_value_(
    strategy: Strategy,
    optimizers: Sequence[AcceleratedOptimizer],
    parameters: Iterable[Tensor] | Tensor,
    clip_value: float,
    *,
    are_complete: Callable[[Sequence[Tensor]], bool],
) -> None:
    """See `Accelerator.clip_grad_value_`."""
    chosen = strategy.gathered.parts_of(_listed(parameters))
    if are_complete(chosen):
        _unscale_owners(strategy, optimizers, chosen)
        strategy.clip_grad_value_(chosen, clip_value)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        raise ArgumentTypeError(
            f"Clipping takes parameters, got the model {type(parameters).__name__}. Pass model.parameters()."
        )
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _unscale_owners(
    strategy: Strategy, optimizers: Sequence[AcceleratedOptimizer], parameters: Sequence[Tensor]
) -> None:
    """Undo the loss scale of fp16, which goes through the optimizers that own the parameters."""
    if strategy.precision.scaler is None:
        return
    wanted = {id(parameter) for parameter in parameters if parameter.grad is not None}
    owners = [
        item.optimizer
        for item in optimizers
        if any(id(parameter) in wanted for parameter in parameters_of(item))
    ]
    if wanted and not owners:
        raise PrepareError(
            "Clipping under mixed_precision='fp16' must unscale gradients first, which works per optimizer, but no "
            "prepared optimizer owns these parameters. Prepare it: `optimizer = accelerator.prepare(optimizer)`."
        )
    for owner in owners:
        strategy.unscale_(owner)
