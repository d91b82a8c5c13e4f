"""The gradients of an accumulation window that is open while a state is saved or loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["OwnGradient", "UnreducedGradient", "WindowGradients"]


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A gradient that this rank has computed from its own samples, before ranks reduce it.

    Attributes:
        values: of the whole gradient, or of what a division by the script leaves on this rank.
        placements: over each dimension of the mesh of that division, the tensor's dimension that is divided, as a
            number; "whole"; or "sum" or "avg", if ranks have summands.
    """

    values: Tensor
    placements: Sequence[str] = ()


class UnreducedGradient(Protocol):
    """The place, outside of `parameter.grad`, where an engine keeps a parameter's gradient until ranks reduce it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's values."""
        ...

    @property
    def mesh_dimensions(self) -> int:
        """How many dimensions of a mesh the script has divided the parameter over; 0: none."""
        ...

    @property
    def value(self) -> OwnGradient | None:
        """The gradient; None: there is none."""
        ...


class WindowGradients:
    """Where the gradients of an open window are; here in `parameter.grad`, as plain PyTorch has them.

    An engine that has them elsewhere, and whose form any number of ranks can continue with, overrides `unreduced` and
    `set_unreduced`. Gradients in a form of its own are part of `StateAdapter.rank_state`.

    Args:
        strategy: computes the gradients.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def wait_in_engine(self) -> bool:
        """Whether an engine holds gradients that wait for a step, outside of `parameter.grad`."""
        return False

    @property
    def are_plain(self) -> bool:
        """Whether an engine that can hide gradients has them all in `parameter.grad` in the form of plain PyTorch.

        That is: whole, and from this rank's samples alone, so that any number of ranks can continue with them.
        """
        return False

    def unreduced(self, parameters: Mapping[str, Tensor]) -> dict[str, UnreducedGradient]:
        """The places of these parameters' gradients that are not in `parameter.grad`, by the same names."""
        return {}

    def set_unreduced(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, OwnGradient | None]
    ) -> None:
        """Replace all gradients for which `unreduced` has a place. Collective.

        Args:
            parameters: as for `unreduced`.
            gradients: by name; None: zeros. Parameters without an entry have no gradient.
        """
