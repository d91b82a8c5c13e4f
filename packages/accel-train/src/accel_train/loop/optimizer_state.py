"""Optimizers as part of a training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

import accel_ckpt
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_divided
from accel_state.log import get_logger
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.state_part import SavedTrees, StatePart, Trees, leaves, taken_up
from accel_train.strategies.state_adapter import StateAdapter

__all__ = ["OptimizerStates"]

_logger = get_logger(__name__)


class OptimizerStates(StatePart):
    """States and options of optimizers, and whether they skipped their last step.

    Args:
        states: knows where the states are.
        optimizers: the prepared optimizers.
        models: the models before wrapping, whose parameters name the states.
        named: the models with their canonical names; for a save.
    """

    group: ClassVar[str | None] = "optimizers"

    def __init__(
        self,
        states: StateAdapter,
        optimizers: Sequence[AcceleratedOptimizer],
        models: Sequence[nn.Module],
        named: Sequence[NamedModel],
    ) -> None:
        self._states, self._optimizers = states, optimizers
        self._models, self._named = models, named

    def dump(self, trees: Trees) -> None:
        """One shared tree for each; flags are shared progress."""
        for index, optimizer in enumerate(self._optimizers):
            state = self._states.optimizer_state(optimizer.optimizer, self._named)
            trees.shared[f"optimizer_{index}"] = state
        trees.progress["optimizers"] = [
            {"skipped": optimizer.step_was_skipped, "spent": optimizer.gradients_spent}
            for optimizer in self._optimizers
        ]

    def needs_all_ranks(self, trees: Trees) -> str | None:
        """Ranks may hold parts."""
        for index in range(len(self._optimizers)):
            if any(is_divided(leaf) for leaf in leaves(trees.shared[f"optimizer_{index}"])):
                return (
                    f"but the strategy {self._states.strategy.name!r} divides the state of optimizer {index} among "
                    "processes, and each saves its part. Call save_state() on all processes: move it out of `if "
                    "accelerator.is_main_process:`."
                )
        return None

    def expected(self) -> Iterator[str]:
        """A tree for each."""
        yield from (f"optimizer_{index}" for index in range(len(self._optimizers)))

    def read(self, saved: SavedTrees) -> None:
        """Say it where ranks had states of their own, which no other part has taken up."""
        if "optimizers" in saved.known:
            _logger.warning(
                f"{saved.directory} holds optimizer states of each of {saved.saved_by} ranks, which they trained for "
                f"themselves; {saved.ranks} ranks continue with those of rank 0."
            )

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """Whether names, shapes and classes are those of the optimizers here."""
        for index, optimizer in enumerate(self._optimizers):
            with taken_up(f"the state of optimizer {index}", saved.directory):
                tree = saved.shared[f"optimizer_{index}"]
                try:
                    self._states.check_optimizer_state(optimizer.optimizer, tree, self._models)
                except accel_ckpt.StateMismatchError as error:
                    raise accel_ckpt.StateMismatchError(
                        f"{saved.directory} does not fit optimizer {index} of this script: {error}"
                    ) from error

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Fill the states in place."""
        for index, optimizer in enumerate(self._optimizers):
            with taken_up(f"the state of optimizer {index}", saved.directory):
                tree = saved.shared[f"optimizer_{index}"]
                self._states.load_optimizer_state(optimizer.optimizer, tree, self._models)
        flags = saved.progress.get("optimizers", [])
        for optimizer, its_flags in zip(self._optimizers, flags, strict=False):
            optimizer.restore_flags(**its_flags)
