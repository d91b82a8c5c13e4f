"""The strategy axis: how ranks cooperate.

`Strategy` is the null object of the axis: one process, nothing wrapped, nothing reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["Capabilities", "Strategy", "StrategyOptions"]


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can be combined with; `accel_train.setup.resolve` checks it before anything is built.

    Attributes:
        precisions: names of the precisions it can run, or None for all of them.
        device_types: device types it can run on, or None for all of them.
        needs_process_group: whether more than one process must have formed a world.
    """

    precisions: frozenset[str] | None = None
    device_types: frozenset[str] | None = None
    needs_process_group: bool = False


@dataclass(frozen=True)
class StrategyOptions:
    """What the resolver hands to a strategy.

    Attributes:
        device: device of this rank.
        world_size: number of ranks.
        ddp_kwargs: keyword arguments of `torch.nn.parallel.DistributedDataParallel`.
        comm_hook: called with the wrapped model, registers a communication hook.
        plugin: the plugin that selected the strategy, with its options; None: the number of processes selected it.
    """

    device: torch.device
    world_size: int = 1
    ddp_kwargs: dict[str, object] = field(default_factory=dict)
    comm_hook: object | None = None
    plugin: object | None = None


class Strategy:
    """One process. Subclasses override the verbs in which their way of cooperating differs."""

    name: ClassVar[str] = "single"
    capabilities: ClassVar[Capabilities] = Capabilities()

    #: Backward leaves gradients averaged over this many ranks (1: nothing is reduced).
    gradient_averaging_ranks: int = 1

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that users call: `model` itself, or a wrapper that reduces gradients."""
        return model

    def is_wrapped(self, model: nn.Module) -> bool:
        """Whether `model` is already this strategy's wrapper."""
        return False

    def keeps_replicas(self, model: nn.Module) -> bool:
        """Whether all ranks hold the parameters of a prepared model, and what optimizers derive from them, alike."""
        return False

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether a prepared `model` has changed so that it must be prepared anew."""
        return False

    def replica_state(self, model: nn.Module) -> dict[str, Any]:
        """Plain data that the wrapper of this rank's replica goes on with, between two micro-batches."""
        return {}

    def restore_replica(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Go back to what `replica_state` returned."""

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Say whether the next backward passes of `model` reduce gradients across ranks."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward passes of `model` accumulate locally."""
        return contextlib.nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context whose backward reduces, although the forwards before it ran under `no_sync`."""
        return contextlib.nullcontext()

    def join(
        self, joinables: Sequence[object], *, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[object]:
        """Context in which ranks that ran out of data shadow the collectives of the others."""
        return contextlib.nullcontext()

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply the gradients accumulated so far, in place.

        Args:
            parameters: whose gradients; one that comes twice is scaled once.
            factor: a number, or a 0-d tensor on the gradients' device.
        """
        gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
        _scale(list(gradients.values()), factor)

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of all gradients together; returns the norm before clipping, a 0-d tensor."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients together, a 0-d tensor; changes nothing."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(parameters, clip_value)


def _scale(gradients: list[Tensor], factor: float | Tensor) -> None:
    sparse = [gradient for gradient in gradients if gradient.is_sparse]
    for gradient in sparse:
        gradient.mul_(factor)
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
