"""Degrees of parallelism: whether they multiply to the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["DIMENSIONS", "degrees_of", "misfit"]

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Kinds of parallelism that a configuration has degrees of, in the order of the mesh."""


def degrees_of(section: Any) -> dict[str, int]:
    """Ranks of each dimension, by the options ``<dimension>_size``; 1 where unset."""
    return {name: getattr(section, f"{name}_size") or 1 for name in DIMENSIONS}


def misfit(degrees: Mapping[str, int], ranks: int) -> str | None:
    """Why degrees do not fit a number of ranks, and values that would fit; None if they fit.

    Degrees that are all 1 fit: every rank then has a replica.
    """
    product = math.prod(degrees.values())
    if product in (ranks, 1):
        return None
    named = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    others = product // degrees["dp_replicate"]
    ways = [f"start {product} processes"]
    if ranks % others == 0:
        ways.append(f"set dp_replicate_size to {ranks // others}")
    others = product // degrees["dp_shard"]
    if ranks % others == 0:
        ways.append(f"set dp_shard_size to {ranks // others}")
    return f"the degrees {named} multiply to {product}, and there are {ranks} processes; {', or '.join(ways)}"
