"""Counters of an `Accelerator` as part of a training state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_train.setup.prepared import Prepared
from accel_train.state_part import SavedTrees, StatePart, Trees, check_order

__all__ = ["Counters"]


class Counters(StatePart):
    """`accelerator.step`, the number of the next automatic checkpoint, and what the checkpoint says of the run: the
    classes of the models, the strategy and the precision.

    Args:
        prepared: has both.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def dump(self, trees: Trees) -> None:
        """A shared number; the others are progress."""
        trees.shared["step"] = self._prepared.step
        trees.progress["save_iteration"] = self._prepared.project.iteration + 1
        trees.progress["models"] = self._classes()
        plan = self._prepared.plan
        trees.progress.update(strategy=plan.strategy.name, precision=plan.precision.name)

    def _classes(self) -> list[str]:
        return [type(model).__name__ for model in self._prepared.models]

    def expected(self) -> Iterator[str]:
        """The number of the step."""
        yield "step"

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """Weights go to a model of the same class, if there is one."""
        check_order("model", self._classes(), saved, "models")

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Count on from there."""
        self._prepared.step = saved.shared["step"]
        if "save_iteration" in saved.progress:
            self._prepared.project.iteration = saved.progress["save_iteration"]
