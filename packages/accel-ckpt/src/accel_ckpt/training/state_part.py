"""The parts of a training's state: one `StatePart` for each kind of object that has a state.

Optimizers, schedulers, loaders, counters, random numbers, and any object with a ``state_dict()`` have a part. A save
collects the states of all parts. A load lets all of them read and check the saved states before any of them changes
anything, and then lets them load in the order in which they are listed. `Checkpointer` does so with the parts of the
objects that it is given (`object_parts.py`), a trainer with its own. A new kind of state is a class beside its object.
Weights are not a part: they are saved as models, and filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

__all__ = ["Groups", "SavedTrees", "StatePart", "Trees"]

Groups: TypeAlias = frozenset[str]
"""Names of groups of parts; a load may restore only some of them."""


@dataclass
class Trees:
    """The trees that a rank saves besides weights, of plain data and tensors, by name.

    Attributes:
        shared: trees that are the same on every rank, and saved once; differences of a rank are found and saved beside.
        own: trees of this rank only.
    """

    shared: dict[str, Any] = field(default_factory=lambda: {"progress": {}})
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> dict[str, Any]:
        """The shared tree of small values, to which any part may add an entry under its name."""
        progress: dict[str, Any] = self.shared["progress"]
        return progress


@dataclass
class SavedTrees:
    """The trees in a checkpoint, besides weights, for this rank.

    Attributes:
        directory: the checkpoint.
        shared: the shared trees, with the differences that this rank saved; optimizers may replace entries.
        own: the trees of this rank; None if it did not save, which the caller allows.
        known: the same, or those of the first rank that saved.
        rank: this rank.
        ranks: number of ranks that continue.
        saved_by: number of ranks that saved.
        saved_ranks: ranks whose trees were saved.
        world_size: number of ranks that trained; more than `saved_by` if the main process saved alone.
        groups: groups of parts that are restored.
        of_rank: returns the trees of any rank that saved.
    """

    directory: Path
    shared: dict[str, Any]
    own: Mapping[str, Any] | None
    known: Mapping[str, Any]
    rank: int
    ranks: int
    saved_by: int
    saved_ranks: Sequence[int]
    world_size: int
    groups: Groups
    of_rank: Callable[[int], Mapping[str, Any]]

    @property
    def same_ranks(self) -> bool:
        """Whether each rank loads the trees that it saved itself."""
        return self.own is not None and self.ranks == self.world_size

    @property
    def progress(self) -> Mapping[str, Any]:
        """The shared tree of small values; empty if another program saved."""
        progress: Mapping[str, Any] = self.shared.get("progress", {})
        return progress


class StatePart:
    """One kind of state. It keeps nothing between calls: the result of `read` is passed to `check` and `load`.

    Attributes:
        group: its name in a load that restores only some parts; None: only the load of a whole state restores it.
    """

    group: ClassVar[str | None] = None

    def is_wanted(self, groups: Groups, everything: Groups) -> bool:
        """Whether the part takes part in a load.

        Args:
            groups: groups that are restored.
            everything: all groups.
        """
        return groups == everything if self.group is None else self.group in groups

    def dump(self, trees: Trees) -> None:
        """Add the state to `Trees`. Tensors are the training's own: the save copies them. May raise on one rank."""

    def needs_all_ranks(self, trees: Trees) -> str | None:
        """Why the main process cannot save this part alone; None: it can.

        The text continues a sentence that says so, and says what to do.
        """
        return None

    def expected(self) -> Iterator[str]:
        """The names of its trees in `Trees.shared`, such as ``optimizer_0``; without them it cannot be restored."""
        yield from ()

    def read(self, saved: SavedTrees) -> Any:
        """Read the state for this rank; None if an older checkpoint lacks it. Needs no model, and changes nothing.

        Raises:
            StateMismatchError: the state does not fit the prepared objects.
            CorruptCheckpointError: `dump` has not written such a state.
        """
        return None

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """Compare the state with the models, which load hooks may have changed since. Changes nothing.

        Raises:
            StateMismatchError: the state does not fit the models.
        """

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Load what `read` returned."""
