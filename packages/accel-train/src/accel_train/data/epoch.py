"""Where a loader is: which epoch, which draw, how far."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_train.data.dispatch_wire import Envelope
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.data.sampling.permutations import Record
from accel_train.data.workers import WorkerNotes
from accel_train.errors import DataError

__all__ = ["Epoch", "Restored", "Run"]

_VERSION = 1


class Run:
    """One iteration over a loader, as far as the loader must remember it."""

    __slots__ = (
        "begun_with",
        "drew_along",
        "ended",
        "first_base",
        "first_batch",
        "first_with",
        "found_end",
        "iterator",
        "looked_ahead",
        "part",
        "per_batch",
        "real",
        "skipped",
        "source",
        "source_before",
        "stream",
        "stride",
        "workers",
        "yielded",
    )

    def __init__(self) -> None:
        self.yielded = 0
        """Batches handed to the user."""
        self.skipped = 0
        """Batches left out before the first one, where the stream does not count them."""
        self.first_base = 0
        """The same in batches of the user's loader, where one batch here takes several."""
        self.first_with: dict[str, Any] | None = None
        """The generators before the epoch's first batch was read, where it may be read again for padding."""
        self.first_batch: Any = None
        """The epoch's first batch, where it may be needed for padding and could not be read again."""
        self.stride: int | None = None
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        self.ended = False
        """Exhausted: the iterator has raised `StopIteration`."""
        self.found_end = False
        """Looking ahead found nothing after the batch handed out last."""
        self.stream: IndexStream | None = None
        """The index batches of a map-style dataset."""
        self.real: int | None = None
        """Real samples in the global batch handed out last, where the batch itself brought the number."""
        self.part: Envelope | None = None
        """What rank 0 said about the batch handed out last, without the batch."""
        self.per_batch: int | None = None
        """Batches of the user's loader that one batch here takes, where it is not one."""
        self.begun_with: dict[str, Any] | None = None
        """The generators before torch's iterator, and the samplers, drew from them."""
        self.looked_ahead: tuple[Any, int] | None = None
        """The generators before batches were read ahead in this process, and how many batches these are."""
        self.drew_along = False
        """Whether this rank made the draws of the order that another rank iterates."""
        self.source: Callable[[], dict[str, Any]] | None = None
        """The state of a source that says itself where it is."""
        self.source_before: dict[str, Any] | None = None
        """The same before batches were read ahead."""
        self.workers: WorkerNotes | None = None
        """What worker processes reported of their generators."""
        self.iterator: weakref.ref[Any] | None = None

    @property
    def live(self) -> bool:
        """Whether its iterator exists and has not come to the end."""
        return not self.ended and self.iterator is not None and self.iterator() is not None

    def read_ahead(self, generators: Any, batches: int) -> None:
        """Note that `batches` were read ahead, with which generators (None: in other processes)."""
        self.looked_ahead = None if generators is None or not batches else (generators, batches)
        if not batches:
            self.source_before = None


@dataclass(frozen=True, slots=True)
class Restored:
    """A loaded state that waits for the next iterator of its epoch."""

    epoch: int
    draw: Record
    begun_with: dict[str, Any] | None
    position: dict[str, Any]
    batches: int
    ranks: int
    ahead: dict[str, Any]
    """What had been read ahead: ``batches``, and the generators ``with`` which they were read; and ``first_with``, the
    generators with which the epoch's first batch was read, where it may be read again, or that batch as ``first``."""
    source: dict[str, Any] | None
    """The state of a source that says itself where it is."""
    workers: dict[str, Any] | None
    """The generators of worker processes: their ``count``, whose ``turn`` it is, and the ``states``."""


@dataclass(slots=True)
class Epoch:
    """The state that a loader shares with the loaders that `skip_first_batches` makes of it."""

    iteration: int = 0
    restored: Restored | None = None
    run: Run | None = field(default=None)

    def __getstate__(self) -> tuple[int, Restored | None]:
        return self.iteration, self.restored  # a running iteration does not travel

    def __setstate__(self, state: tuple[int, Restored | None]) -> None:
        self.iteration, self.restored = state
        self.run = None

    def choose(self, epoch: int) -> None:
        """Make `epoch` the next one; a loaded state of another epoch is of no use then."""
        self.iteration = epoch
        self.restored = self.waiting()

    def waiting(self) -> Restored | None:
        """The loaded state, if the next iteration is of its epoch."""
        restored = self.restored
        return restored if restored is not None and restored.epoch == self.iteration else None

    def take(self) -> Restored | None:
        """The same, for the iteration that begins now; a state of another epoch is dropped."""
        waiting, self.restored = self.waiting(), None
        return waiting

    def dump(self, ranks: int, finished: bool) -> dict[str, Any]:
        """The state as plain data and tensors.

        Args:
            ranks: world size of the loader.
            finished: whether the batch handed out last was the last of its epoch.
        """
        waiting, run = self.restored, self.run
        state: dict[str, Any] = {"version": _VERSION, "ranks": ranks, "epoch": self.iteration}
        if waiting is not None and waiting.epoch in (self.iteration, self.iteration - 1):
            return state | {
                "ranks": waiting.ranks,
                "finished": waiting.epoch < self.iteration,
                "batches_yielded": waiting.batches,
                "position": waiting.position,
                "draw": waiting.draw,
                "begun_with": waiting.begun_with,
                "ahead": waiting.ahead,
                "source": waiting.source,
                "workers": waiting.workers,
            }
        if run is None or run.ended:
            nothing: dict[str, Any] = {
                "position": {},
                "draw": {},
                "begun_with": None,
                "ahead": {},
                "source": None,
            }
            return state | {"finished": True, "batches_yielded": 0, **nothing}
        # An epoch whose last batch is out is over, whether or not the loop has asked for more. Where it was is kept
        # nevertheless, for a script that goes back to it and skips all its batches.
        batches, position = _place(run)
        draw: Record = {} if run.stream is None else dict(run.stream.drawn())
        if finished and "exhausted" in draw:
            draw["exhausted"] = True  # the generators are saved as they are after the end
        return state | {
            "epoch": self.iteration + (1 if finished else 0),
            "finished": finished,
            "batches_yielded": batches,
            "position": position,
            "draw": {"along": True} if run.drew_along else draw,
            "begun_with": run.begun_with,
            "ahead": {},
            "source": None if finished or run.source is None else run.source_before or run.source(),
            "workers": None if run.workers is None else run.workers.dump(run.yielded * (run.per_batch or 1)),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `dump` made.

        Raises:
            DataError: the state is not one, or of a newer version.
        """
        missing = {"version", "epoch", "finished", "position", "batches_yielded", "ranks", "draw"} - set(
            state
        )
        if missing:
            raise DataError(
                f"This is not the state of a data loader: {', '.join(sorted(missing))} missing in a "
                f"mapping with the keys {sorted(map(str, state))}. Pass what `state_dict()` of a prepared "
                "loader returned."
            )
        if state["version"] > _VERSION:
            raise DataError(
                f"The loader state has version {state['version']}, this release reads up to {_VERSION}. "
                "Upgrade accel-train, or start the epoch anew."
            )
        self.iteration = int(state["epoch"])
        self.run = None
        self.restored = None
        if state["finished"] and not state["batches_yielded"]:
            return
        self.restored = Restored(
            epoch=self.iteration - (1 if state["finished"] else 0),
            draw=dict(state["draw"]),
            begun_with=state.get("begun_with"),
            position=dict(state["position"]),
            batches=int(state["batches_yielded"]),
            ranks=int(state["ranks"]),
            ahead=dict(state.get("ahead") or {}),
            source=state.get("source"),
            workers=state.get("workers"),
        )


def _place(run: Run) -> tuple[int, dict[str, Any]]:
    """Batches since the epoch began, and the position after them."""
    stream = run.stream
    if run.per_batch is None:
        if stream is None:
            batches = run.skipped + run.yielded
            return batches, {"local_batches": batches, "samples_per_batch": run.stride}
        return stream.first + run.yielded, stream.consumed(run.yielded)
    base = run.first_base + run.yielded * run.per_batch
    position: dict[str, Any] = {"base_batches": base}
    if stream is not None:
        position = {**stream.consumed(base - stream.first), **position}
        position.pop("samples", None)  # rank 0 counts batches
    return run.skipped + run.yielded, position
