"""State of replicas that differs between ranks: buffers, and state of the strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_divided
from accel_state.log import get_logger
from accel_train.state_part import SavedTrees, StatePart, Trees, leaves, taken_up
from accel_train.strategies.state_adapter import StateAdapter

__all__ = ["ReplicaStates", "replicated_buffers"]

_logger = get_logger(__name__)


class ReplicaStates(StatePart):
    """This rank's own state of each prepared model, from the strategy, and buffers that differ between ranks.

    Buffers are found by comparing ranks, so the save adds them (`checkpoints.collecting`).

    Args:
        states: knows what the strategy's wrappers hold.
        prepared: the prepared models.
        named: the models with their canonical names.
        several: there are other ranks.
    """

    def __init__(
        self, states: StateAdapter, prepared: Sequence[nn.Module], named: Sequence[NamedModel], several: bool
    ) -> None:
        self._states, self._prepared, self._named, self._several = states, prepared, named, several

    def dump(self, trees: Trees) -> None:
        """A tree of this rank."""
        trees.own["replicas"] = [self._states.rank_state(model) for model in self._prepared]

    def needs_all_ranks(self, trees: Trees) -> str | None:
        """Every rank has tensors of its own."""
        if any(map(_is_tensor, leaves(trees.own["replicas"]))):
            what = self._states.rank_tensors
            return f"and every process has {what} of its own. Call save_state() on all processes."
        return None

    def read(self, saved: SavedTrees) -> Mapping[str, Any] | None:
        """Read this rank's state; None if another number of ranks continues, or another program saved."""
        if "replicas" not in saved.known:
            return None
        states = saved.known["replicas"]
        if not saved.same_ranks:
            kept = {name for state in states for name in state if any(map(_is_tensor, leaves(state[name])))}
            if kept:
                _logger.warning(
                    f"{saved.directory} holds {', '.join(sorted(kept))} of each of {saved.saved_by} ranks, with which "
                    f"{saved.ranks} ranks cannot continue: it begins from the start."
                )
            return None
        for model, state in zip(self._prepared, states, strict=False):
            misfit = self._states.rank_state_misfit(model, state)
            if misfit is not None:
                raise accel_ckpt.StateMismatchError(
                    f"{saved.directory} does not fit {type(self._states.strategy.plain(model)).__name__} here: {misfit}"
                )
        return saved.known

    def load(self, taken: Mapping[str, Any] | None, saved: SavedTrees) -> None:
        """Load each model's state, or begin from the start; fill the buffers."""
        states = [] if taken is None else taken["replicas"]
        with taken_up("what a rank has of its own", saved.directory):
            for number, model in enumerate(self._prepared):
                self._states.load_rank_state(model, states[number] if number < len(states) else {})
            if taken is None:
                return
            buffers = replicated_buffers(self._named) if self._several else {}
            for name, values in taken["buffers"].items():
                buffers[name].copy_(values)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def replicated_buffers(named: Sequence[NamedModel]) -> dict[str, torch.Tensor]:
    """Buffers that every rank has whole, by name: strategies that divide parameters do not divide buffers."""
    found: dict[str, torch.Tensor] = {}
    for index, model in enumerate(named):
        saved = model.state_dict()
        for name, buffer in model.buffers().items():
            if name in saved and not is_divided(buffer):
                found[f"model_{index}.{name}"] = buffer
    return found
