"""Degrees of parallelism: whether they multiply to the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["DIMENSIONS", "degrees_of", "experts_misfit", "misfit", "stages_misfit"]

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Kinds of parallelism that a configuration has degrees of, in the order of the mesh."""


def degrees_of(section: Any) -> dict[str, int]:
    """Ranks of each dimension, by the options ``<dimension>_size``; 1 where unset."""
    return {name: getattr(section, f"{name}_size") or 1 for name in DIMENSIONS}


def experts_misfit(degrees: Mapping[str, int], experts: int) -> str | None:
    """Why a replica's ranks cannot be divided into groups that hold all experts together; None if they can.

    Args:
        degrees: ranks of each dimension.
        experts: ranks of a group (``ep_size``). Groups lie inside a replica.
    """
    if experts == 1:
        return None
    replica = math.prod(size for name, size in degrees.items() if name != "dp_replicate")
    if degrees.get("pp", 1) > 1:
        return (
            f"ep_size={experts} and pp_size={degrees['pp']} cannot be combined; leave out one of them: stages of a "
            "pipeline hold all experts of their layers"
        )
    if replica % experts:
        return (
            f"ep_size={experts} does not divide the {replica} ranks of a replica (dp_shard_size x cp_size x sp_size x "
            f"tp_size); choose a divisor of {replica}"
        )
    return None


def stages_misfit(degrees: Mapping[str, int]) -> str | None:
    """Why stages of a pipeline cannot have these degrees; None if they can."""
    for name in ("cp", "sp"):
        if degrees["pp"] > 1 and degrees[name] > 1:
            return (
                f"{name}_size={degrees[name]} and pp_size={degrees['pp']} cannot be combined; leave out one of them: "
                "stages of a pipeline pass on whole sequences"
            )
    return None


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
