"""Finding the repeated blocks of a model, which are compiled once, and sharded and checkpointed as units."""

from __future__ import annotations

from torch import nn

__all__ = ["repeated_blocks"]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the members of every non-empty `ModuleList` whose members are all of one class, outermost lists only."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 0 and len({type(item) for item in child}) == 1:
            found.extend(child)
        else:
            found.extend(repeated_blocks(child))
    return found
