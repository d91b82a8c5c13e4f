"""The parameters that optimizers step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["parameter_ids", "parameters_of"]


def parameters_of(*optimizers: Any) -> Iterator[Tensor]:
    """The parameters of all groups, in the order of the groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def parameter_ids(*optimizers: Any) -> set[int]:
    """The `id`s of the parameters of all groups."""
    return {id(parameter) for parameter in parameters_of(*optimizers)}
