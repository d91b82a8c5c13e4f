"""The gradient scaler as part of a training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from accel_train.precision.base import Precision
from accel_train.state_part import SavedTrees, StatePart, Trees, taken_up

__all__ = ["ScalerState"]


class ScalerState(StatePart):
    """The loss scale, which belongs to the optimizers.

    Args:
        precision: has the scaler, if there is one.
        optimizers: the prepared optimizers.
    """

    group: ClassVar[str | None] = "optimizers"

    def __init__(self, precision: Precision, optimizers: Sequence[Any]) -> None:
        self._precision, self._optimizers = precision, optimizers

    def dump(self, trees: Trees) -> None:
        """A shared tree, if there is a scaler."""
        state = self._precision.state_dict([optimizer.optimizer for optimizer in self._optimizers])
        if state is not None:
            trees.shared["scaler"] = state

    def expected(self) -> Iterator[str]:
        """The tree, if there is a scaler."""
        if self._precision.has_state:
            yield "scaler"

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Go back to the scale."""
        if "scaler" in saved.shared:
            with taken_up("the state of the gradient scaler", saved.directory):
                optimizers = [optimizer.optimizer for optimizer in self._optimizers]
                self._precision.load_state_dict(saved.shared["scaler"], optimizers)
