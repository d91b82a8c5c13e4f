"""Groups of ranks: those that read different samples, and those that have different losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that differ in one respect (their samples, say), seen from one of them.

    With data parallelism alone every rank differs from every other. On a mesh with tensor parallelism, ranks of one
    tensor-parallel group read the same samples: four ranks in groups of two then have two different indexes.

    Attributes:
        size: how many different indexes there are.
        index: the index of this rank.
        group: the process group in which each index occurs once; None: all ranks of the world (or, with `size` 1, this
            rank alone, which communicates with no other).
        index_of: the index of every rank of the world, by rank.
        rank: this rank's number in the world.
    """

    size: int = 1
    index: int = 0
    group: Any = None
    index_of: tuple[int, ...] = (0,)
    rank: int = 0

    @classmethod
    def of_world(cls, world_size: int, rank: int) -> Ranks:
        """Every rank differs from every other."""
        return cls(world_size, rank, None, tuple(range(world_size)), rank)

    @property
    def world_size(self) -> int:
        """Number of ranks of the world, including ranks with the same index."""
        return len(self.index_of)

    @property
    def repeats(self) -> bool:
        """Whether several ranks have the same index."""
        return len(self.index_of) > self.size

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the world with its index."""
        return self.index_of.index(self.index) == self.rank
