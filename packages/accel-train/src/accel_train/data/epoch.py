"""Which epoch a loader is in, and what is saved of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_train.data.iteration import Iteration
from accel_train.data.sampling.permutations import Record
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["Epoch", "Restored"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Restored:
    """A loaded state that waits for the next iterator of its epoch."""

    epoch: int
    draw: Record
    rng_at_start: dict[str, Any] | None
    position: dict[str, Any]
    batches: int
    ranks: int
    """How many ranks read different samples."""
    index: int | None
    """The index of the rank that saved the state; None: the same as here."""
    options: dict[str, Any]
    """Options of the loader on which the position depends: ``num_workers``, ``batch_size`` and ``drop_last``."""
    ahead: dict[str, Any]
    """See `Iteration.ahead`."""
    source: dict[str, Any] | None
    """The position of a dataset that keeps its own."""
    workers: dict[str, Any] | None
    """The generators of worker processes: their ``count``, whose ``turn`` it is, and the ``states``."""
    reading: dict[str, Any] | None
    """The random states for reading, where several ranks read the same samples."""

    def is_of(self, ranks: Ranks) -> bool:
        """Whether the state was saved by a rank that read what this one reads; otherwise only the position holds."""
        return self.ranks == ranks.size and self.index in (None, ranks.index)

    def tree(self) -> dict[str, Any]:
        """The state again, as `Epoch.dump` made it."""
        return {
            "ranks": self.ranks,
            "index": self.index,
            "options": self.options,
            "batches_yielded": self.batches,
            "position": self.position,
            "draw": self.draw,
            "rng_at_start": self.rng_at_start,
            "ahead": self.ahead,
            "source": self.source,
            "workers": self.workers,
            "reading": self.reading,
        }


@dataclass(slots=True)
class Epoch:
    """The state that a loader shares with the loaders that `skip_first_batches` makes of it."""

    iteration: int = 0
    restored: Restored | None = None
    running: Iteration | None = field(default=None)

    def __getstate__(self) -> tuple[int, Restored | None]:
        return self.iteration, self.restored  # a running iteration does not travel

    def __setstate__(self, state: tuple[int, Restored | None]) -> None:
        self.iteration, self.restored = state
        self.running = None

    def choose(self, epoch: int) -> None:
        """Make `epoch` the next one; a loaded state of another epoch is of no use then."""
        self.iteration = epoch
        self.restored = self.waiting()

    def waiting(self) -> Restored | None:
        """The loaded state, if the next iteration is of its epoch."""
        restored = self.restored
        return restored if restored is not None and restored.epoch == self.iteration else None

    def take(self) -> Restored | None:
        """The same, for the iteration that begins now; a state of another epoch is dropped.

        What an iteration has taken that yielded nothing of it is given to the next one.
        """
        running = self.running
        if self.restored is None and running is not None and not running.yielded and not running.ended:
            self.restored = running.restored
        waiting, self.restored = self.waiting(), None
        return waiting

    def between(self, ranks: Ranks) -> dict[str, Any]:
        """The state between two epochs, as plain data."""
        return {
            "version": _VERSION,
            "epoch": self.iteration,
            "finished": True,
            "ranks": ranks.size,
            "index": ranks.index,
            "options": {},
            "batches_yielded": 0,
            "position": {},
            "draw": {},
            "rng_at_start": None,
            "ahead": {},
            "source": None,
            "workers": None,
            "reading": None,
        }

    def dump(self, ranks: Ranks, options: dict[str, Any], finished: bool) -> dict[str, Any]:
        """The state as plain data and tensors.

        Args:
            ranks: those that read different samples.
            options: see `Restored.options`.
            finished: whether the last returned batch was the last of its epoch.
        """
        waiting, running = self.restored, self.running
        state = self.between(ranks) | {"options": options}
        if waiting is not None and waiting.epoch in (self.iteration, self.iteration - 1):
            return state | {"finished": waiting.epoch < self.iteration} | waiting.tree()
        if running is None or running.ended:
            return state
        # An epoch whose last batch was returned is over, whether or not the loop has asked for more. Its position is
        # kept nevertheless, for a script that returns to it and skips all its batches.
        batches, position = running.place()
        return state | {
            "epoch": self.iteration + (1 if finished else 0),
            "finished": finished,
            "batches_yielded": batches,
            "position": position,
            "draw": running.draw(finished),
            "rng_at_start": running.rng_at_start,
            "ahead": running.ahead(),
            "source": None if finished else running.position_of_source(),
            "workers": running.states_of_workers(),
            "reading": None if running.reading is None else running.reading.tree(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `dump` made, and `read` has checked."""
        self.iteration = int(state["epoch"])
        self.running = None
        self.restored = read(state)


def read(state: dict[str, Any]) -> Restored | None:
    """What of a state waits for the next iterator of its epoch; None if nothing does.

    Raises:
        DataError: the state is not one, or of a newer version.
    """
    needed = {"version", "epoch", "finished", "position", "batches_yielded", "ranks", "draw"}
    missing = needed - set(state)
    if missing:
        raise DataError(
            f"This is not the state of a data loader: {', '.join(sorted(missing))} missing in a mapping with the keys "
            f"{sorted(map(str, state))}. Pass what `state_dict()` of a prepared loader returned."
        )
    if state["version"] > _VERSION:
        raise DataError(
            f"The loader state has version {state['version']}, this release reads up to {_VERSION}. Upgrade "
            "accel-train, or start the epoch from its beginning."
        )
    if state["finished"] and not state["batches_yielded"]:
        return None
    index = state.get("index")
    return Restored(
        epoch=int(state["epoch"]) - (1 if state["finished"] else 0),
        draw=dict(state["draw"]),
        rng_at_start=state.get("rng_at_start"),
        position=dict(state["position"]),
        batches=int(state["batches_yielded"]),
        ranks=int(state["ranks"]),
        index=None if index is None else int(index),
        options=dict(state.get("options") or {}),
        ahead=dict(state.get("ahead") or {}),
        source=state.get("source"),
        workers=state.get("workers"),
        reading=state.get("reading"),
    )
