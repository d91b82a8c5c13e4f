"""States that all ranks take over from one of them, after they have taken different numbers of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accel_state.operations.collectives import broadcast, broadcast_object_list
from accel_state.trees import flatten, unflatten
from accel_train.ranks import Ranks

__all__ = ["AveragesWeights", "ShareScale", "take_states"]

ShareScale = Callable[[Callable[[Tensor], Tensor]], None]
"""A precision's `share_scale`: takes over the loss scale that a collective returns."""


class _Stateful(Protocol):
    """An optimizer or a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class AveragesWeights(Protocol):
    """Averages of the weights of a prepared model, which follow the copies that ranks train of it.

    Attributes:
        plain: the model without wrappers.
        decay: the weight of the average in each update.
    """

    plain: nn.Module
    decay: float | None

    def shared(self) -> AbstractContextManager[list[Tensor]]:
        """Context in which the caller makes its tensors equal on all ranks, the number of updates among them."""
        ...


def take_states(owners: Sequence[_Stateful], source: int, ranks: Ranks, device: torch.device) -> None:
    """Load on all ranks what one of them has; a collective.

    Args:
        owners: the same on all ranks. A rank that took no step may have no state yet.
        source: the rank of the world whose states hold.
        ranks: the ranks that take part.
        device: where tensors are sent from.
    """
    leaves, spec = flatten([owner.state_dict() for owner in owners])
    described: list[Any] = [spec, [(leaf.shape, leaf.dtype, leaf.device.type) for leaf in leaves]]
    broadcast_object_list(described, source, group=ranks.group)
    spec, forms = described
    is_source = ranks.rank == source
    sent = (
        [leaf.to(device) for leaf in leaves]
        if is_source
        else [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in forms]
    )
    if sent:
        broadcast(sent, source, group=ranks.group)
    if not is_source:
        # Steps of torch's optimizers stay on the host.
        states = unflatten(spec, [leaf.to(kind) for leaf, (*_, kind) in zip(sent, forms, strict=True)])
        for owner, state in zip(owners, states, strict=True):
            owner.load_state_dict(state)
