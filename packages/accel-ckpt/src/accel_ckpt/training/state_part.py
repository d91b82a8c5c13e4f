"""What the state of a training consists of: one `StatePart` for each kind of thing that has a state.

What has a state gives a part: optimizers, schedulers, loaders, counters, random numbers, any object with a
``state_dict()``. A save asks all parts what they hold. A load lets all of them read and check what was saved before
any of them changes anything, and then lets them take it up in the order in which they are listed. `Checkpointer` does
so with the parts of the objects that it is given (`object_parts.py`), a trainer with its own. A new kind of state is a
class beside what has it. Weights are no part: they are saved as models, and filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

__all__ = ["Groups", "SavedTrees", "StatePart", "Trees"]

Groups: TypeAlias = frozenset[str]
"""Names of groups of parts, where a load may restore some of them."""


@dataclass
class Trees:
    """What a rank saves besides weights, as trees of plain data and tensors, by name.

    Attributes:
        shared: is the same on every rank, and saved once; what a rank has otherwise is found and saved beside.
        own: is of this rank.
    """

    shared: dict[str, Any] = field(default_factory=lambda: {"progress": {}})
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> dict[str, Any]:
        """The shared tree of small things, to which any part may add an entry of its name."""
        progress: dict[str, Any] = self.shared["progress"]
        return progress


@dataclass
class SavedTrees:
    """What a checkpoint holds besides weights, for this rank.

    Attributes:
        directory: the checkpoint.
        shared: the shared trees, with what this rank saved otherwise in their place; optimizers may replace entries.
        own: the trees of this rank; None where it did not save, which the caller allows.
        known: the same, or those of the first rank that saved.
        rank: this rank.
        ranks: how many continue.
        saved_by: how many saved.
        saved_ranks: those of which there are trees.
        world_size: of the ranks that trained; more than `saved_by` if the main process saved alone.
        groups: what is restored.
        of_rank: gives the trees of any rank that saved.
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
        """Whether each rank takes up what it saved itself."""
        return self.own is not None and self.ranks == self.world_size

    @property
    def progress(self) -> Mapping[str, Any]:
        """The shared tree of small things; empty where another program saved."""
        progress: Mapping[str, Any] = self.shared.get("progress", {})
        return progress


class StatePart:
    """One kind of state. It keeps nothing between the calls: what `read` returns is handed to `check` and `load`.

    Attributes:
        group: how a load that restores some parts calls it; None: only the load of a whole state restores it.
    """

    group: ClassVar[str | None] = None

    def is_wanted(self, groups: Groups, everything: Groups) -> bool:
        """Whether it takes part in a load.

        Args:
            groups: what is restored.
            everything: all groups there are.
        """
        return groups == everything if self.group is None else self.group in groups

    def dump(self, trees: Trees) -> None:
        """Add what is to be saved. Tensors are the training's own: the save copies them. May raise on one rank."""

    def needs_all_ranks(self, trees: Trees) -> str | None:
        """Why the main process, which saves alone, does not have everything; None: it has.

        It continues a sentence that says so, and says what to do.
        """
        return None

    def expected(self) -> Iterator[str]:
        """The names of its trees in `Trees.shared`, such as ``optimizer_0``; without them it cannot be restored."""
        yield from ()

    def read(self, saved: SavedTrees) -> Any:
        """What this rank takes up; None where an older checkpoint lacks it. Needs no model, and changes nothing.

        Raises:
            StateMismatchError: it does not fit what is prepared here.
            CorruptCheckpointError: it is not what `dump` has written.
        """
        return None

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """Compare it with the models, which load hooks may have changed since. Changes nothing.

        Raises:
            StateMismatchError: it does not fit them.
        """

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Take up what `read` returned."""
