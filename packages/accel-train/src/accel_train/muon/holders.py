"""The ranks that hold parts or copies of a parameter, as its `DTensor` layout and its strategy tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_ckpt.parts import is_sharded
from accel_train.errors import PrepareError
from accel_train.ranks import Ranks

__all__ = ["ALONE", "Holders", "Team", "holders_of", "of_ranks", "team_of"]


@dataclass(frozen=True)
class Team:
    """Ranks of a process group, in its order.

    Attributes:
        ranks: their numbers in the world; empty: this rank alone, which communicates with no other.
        index: this rank's place among them.
        group: the process group; None: all ranks of the world.
    """

    ranks: tuple[int, ...] = ()
    index: int = 0
    group: Any = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """How many."""
        return max(1, len(self.ranks))


ALONE = Team()


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a parameter.

    Attributes:
        parts: those that it is divided among.
        copies: those that hold the same part of it as this rank, and step it alike.
        device: where they communicate, and compute what they exchange.
    """

    parts: Team
    copies: Team
    device: torch.device


def team_of(group: Any) -> Team:
    """The ranks of a process group; None: of the world."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return Team(ranks, dist.get_rank(group), group)


def holders_of(parameter: Tensor, replicas: Team) -> Holders:
    """Who holds a parameter.

    Args:
        parameter: a whole tensor or a `DTensor`.
        replicas: ranks that average their gradients and take every step together; `ALONE` if nothing is known of any.

    Raises:
        PrepareError: its layout is none of `Shard` and `Replicate`, or names no dimensions of a mesh that divides it
            twice.
    """
    if not is_sharded(parameter):
        return Holders(ALONE, replicas, parameter.device)
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    divided: list[int] = []
    teams = [replicas]
    for dimension, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise PrepareError(
                f"A parameter of shape {list(parameter.shape)} has the placement {placement}, a sum over ranks, which "
                "Muon cannot step. Redistribute it to Shard or Replicate."
            )
        if mesh.size(dimension) == 1:
            continue
        if placement.is_replicate():
            teams.append(team_of(mesh.get_group(dimension)))
        else:
            divided.append(dimension)
    members = set(mesh.mesh.flatten().tolist())
    if len(members.intersection(replicas.ranks)) > 1:
        teams[0] = ALONE  # the mesh has them
    copies = max(teams, key=lambda team: team.size)
    return Holders(_parts(mesh, divided), copies, torch.device(mesh.device_type))


def of_ranks(ranks: Ranks | None) -> Team:
    """The same as a team; None: this rank alone."""
    return ALONE if ranks is None or ranks.size == 1 else team_of(ranks.group)


def _parts(mesh: Any, divided: list[int]) -> Team:
    if not divided:
        return ALONE
    if len(divided) == 1:
        return team_of(mesh.get_group(divided[0]))
    names = mesh.mesh_dim_names
    if names is None:
        raise PrepareError(
            f"The device mesh {mesh} divides a parameter in {len(divided)} dimensions and does not name them, so the "
            "ranks of all of them cannot be brought together. Pass mesh_dim_names to init_device_mesh."
        )
    chosen = mesh if len(divided) == mesh.ndim else mesh[tuple(names[dimension] for dimension in divided)]
    return team_of(chosen._flatten().get_group())
