"""Saved weights of one model for strategies: from a checkpoint of this library, or of another program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accel_ckpt
from accel_ckpt.format.memory import own_memory
from accel_ckpt.format.saved_tensors import SavedTensor, fill_all, verify_all
from accel_ckpt.parts import fill_part

__all__ = ["CheckpointModel", "WholeModel"]


class CheckpointModel:
    """A model in a checkpoint of this library; values are read directly into their targets.

    Args:
        checkpoint: the checkpoint.
        index: index of the model.
    """

    def __init__(self, checkpoint: accel_ckpt.TrainingCheckpoint, index: int) -> None:
        self._checkpoint = checkpoint
        self._index = index
        self._weights = checkpoint.weights(index)
        self._whole: dict[str, Any] | None = None

    @property
    def about(self) -> Mapping[str, Any]:
        """Shapes and dtypes of tensors, and other entries of the state dict."""
        return self._weights.about

    def whole(self) -> dict[str, Any]:
        """The state dict; if possible, tensors are views of the files, which are checked once."""
        if self._whole is None:
            self._whole = self._checkpoint.mapped_model(self._index, self._weights)
        return self._whole

    def check(self, targets: Mapping[str, Any]) -> None:
        """Check that `fill` can fill these, and the files that this rank reads for it."""
        self._weights.check(targets)

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Fill tensors in place with this rank's part of each."""
        self._weights.fill(targets)


class WholeModel:
    """A model of another program's checkpoint.

    Args:
        weights: its state dict under canonical names; `SavedTensor` in the place of what is not read yet.
    """

    def __init__(self, weights: dict[str, Any]) -> None:
        self._weights = weights
        self._saved = {name: value for name, value in weights.items() if isinstance(value, SavedTensor)}

    @property
    def about(self) -> Mapping[str, Any]:
        """The state dict."""
        return self._weights

    def whole(self) -> dict[str, Any]:
        """The state dict."""
        if not self._saved:
            return self._weights
        return self._weights | {name: saved.read() for name, saved in self._saved.items()}

    def check(self, targets: Mapping[str, Any]) -> None:
        """Check the files of which this rank reads its part; the others were checked when they were read."""
        verify_all(self._pairs(targets))

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Copy this rank's part to each target."""
        fill_all(self._pairs(targets))
        for name in targets.keys() - self._saved.keys():
            fill_part(targets[name], own_memory(self._weights[name]))

    def _pairs(self, targets: Mapping[str, Any]) -> list[tuple[SavedTensor, Any]]:
        return [(saved, targets[name]) for name, saved in self._saved.items() if name in targets]
