"""The state of a precision, such as the loss scale, as part of a training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from accel_train.precision.base import Precision
from accel_train.state_part import SavedTrees, StatePart, Trees, taken_up

__all__ = ["ScalerState"]


class ScalerState(StatePart):
    """The state of the precision, which belongs to the optimizers. Its tree is ``scaler``, whatever is in it.

    Args:
        precision: of the accelerator.
        optimizers: the prepared optimizers.
    """

    group: ClassVar[str | None] = "optimizers"

    def __init__(self, precision: Precision, optimizers: Sequence[Any]) -> None:
        self._precision, self._optimizers = precision, optimizers

    def dump(self, trees: Trees) -> None:
        """A shared tree, if the precision keeps anything."""
        state = self._precision.state_dict([optimizer.optimizer for optimizer in self._optimizers])
        if state is not None:
            trees.shared["scaler"] = state

    def expected(self) -> Iterator[str]:
        """The tree, if the precision keeps anything."""
        if self._precision.has_state:
            yield "scaler"

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Go back to it."""
        if "scaler" in saved.shared:
            with taken_up("the state of the precision", saved.directory):
                optimizers = [optimizer.optimizer for optimizer in self._optimizers]
                self._precision.load_state_dict(saved.shared["scaler"], optimizers)
