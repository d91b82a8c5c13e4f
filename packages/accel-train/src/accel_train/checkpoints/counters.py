"""Counters of an `Accelerator` as part of a training state."""

from __future__ import annotations

from typing import Any

from accel_train.setup.prepared import Prepared
from accel_train.state_part import SavedTrees, StatePart, Trees

__all__ = ["Counters"]


class Counters(StatePart):
    """`accelerator.step`, and the number of the next automatic checkpoint.

    Args:
        here: has both.
    """

    def __init__(self, here: Prepared) -> None:
        self._here = here

    def dump(self, trees: Trees) -> None:
        """A shared number, and one of progress."""
        trees.shared["step"] = self._here.step
        trees.progress["save_iteration"] = self._here.project.iteration + 1

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Count on from there."""
        self._here.step = saved.shared["step"]
        if "save_iteration" in saved.progress:
            self._here.project.iteration = saved.progress["save_iteration"]
