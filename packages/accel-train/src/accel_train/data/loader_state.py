"""Loaders as part of a training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from accel_train.state_part import SavedTrees, StatePart, Trees, check_order, taken_up

__all__ = ["LoaderStates"]


class LoaderStates(StatePart):
    """The position of each rank in its data.

    Args:
        loaders: the prepared loaders.
    """

    group: ClassVar[str | None] = "loaders"

    def __init__(self, loaders: Sequence[Any]) -> None:
        self._loaders = loaders

    def dump(self, trees: Trees) -> None:
        """A tree of this rank for each; what they are is shared progress."""
        trees.progress["loaders"] = self._kinds()
        for index, loader in enumerate(self._loaders):
            trees.own[f"loader_{index}"] = loader.state_dict()

    def _kinds(self) -> list[str]:
        return [
            f"{type(loader).__name__} of {type(getattr(loader, 'dataset', None)).__name__} in batches of "
            f"{getattr(loader, 'batch_size', None)}"
            for loader in self._loaders
        ]

    def expected(self) -> Iterator[str]:
        """A tree for each."""
        yield from (f"loader_{index}" for index in range(len(self._loaders)))

    def read(self, saved: SavedTrees) -> dict[int, dict[str, Any]]:
        """States by number of the loader; Accelerate saves few of them."""
        check_order("loader", self._kinds(), saved, "loaders")
        names = {index: f"loader_{index}" for index in range(len(self._loaders))}
        states = {index: saved.known[name] for index, name in names.items() if name in saved.known}
        for index, state in states.items():
            self._loaders[index].check_state_dict(state)
        return states

    def load(self, taken: dict[int, dict[str, Any]], saved: SavedTrees) -> None:
        """Hand each its state."""
        for index, state in taken.items():
            with taken_up(f"the state of loader {index}", saved.directory):
                self._loaders[index].load_state_dict(state)
