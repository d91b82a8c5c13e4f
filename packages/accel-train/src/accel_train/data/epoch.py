"""Where a loader is: which epoch, which draw, how far."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from accel_train.data.dispatch_wire import Envelope
from accel_train.data.orders import Record
from accel_train.data.streams import IndexStream
from accel_train.errors import DataError

__all__ = ["Epoch", "Restored", "Run"]

_VERSION = 1


class Run:
    """One iteration over a loader, as far as the loader must remember it."""

    __slots__ = (
        "begun_with",
        "ended",
        "iterator",
        "part",
        "per_batch",
        "real",
        "resumed",
        "skipped",
        "stream",
        "yielded",
    )

    def __init__(self) -> None:
        self.yielded = 0
        """Batches handed to the user."""
        self.skipped = 0
        """Batches left out before the first one, where the stream does not count them."""
        self.resumed = False
        """Whether it continues a saved run by reading the batches before it again."""
        self.ended = False
        """Exhausted: the iterator has raised `StopIteration`."""
        self.stream: IndexStream | None = None
        """The index batches of a map-style dataset."""
        self.real: int | None = None
        """Real samples in the global batch handed out last, where the batch itself brought the number."""
        self.part: Envelope | None = None
        """What rank 0 said about the batch handed out last, without the batch."""
        self.per_batch: int | None = None
        """Batches of the user's loader that one batch here takes, where it is not one."""
        self.begun_with: Tensor | None = None
        """State of the generator that torch's iterator draws its base seed from, before it did."""
        self.iterator: weakref.ref[Any] | None = None

    @property
    def live(self) -> bool:
        """Whether its iterator exists and has not come to the end."""
        return not self.ended and self.iterator is not None and self.iterator() is not None


@dataclass(frozen=True, slots=True)
class Restored:
    """A loaded state that waits for the next iterator."""

    record: Record
    begun_with: Tensor | None
    position: dict[str, int]
    batches: int
    ranks: int


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

    def dump(self, ranks: int, finished: bool) -> dict[str, Any]:
        """The state as plain data and tensors.

        Args:
            ranks: world size of the loader.
            finished: whether the batch handed out last was the last of its epoch.
        """
        waiting, run = self.restored, self.run
        state: dict[str, Any] = {"version": _VERSION, "ranks": ranks, "epoch": self.iteration}
        if waiting is not None:
            return state | {
                "ranks": waiting.ranks,
                "finished": False,
                "batches_yielded": waiting.batches,
                "position": dict(waiting.position),
                **_dump_draws(waiting.record, waiting.begun_with),
            }
        if run is None or run.ended or finished:
            # An epoch whose last batch is out is over, whether or not the loop has asked for more.
            over = 1 if run is not None and finished and not run.ended else 0
            state["epoch"] = self.iteration + over
            return state | {"finished": True, "batches_yielded": 0, "position": {}, **_dump_draws({}, None)}
        stream = run.stream
        batches = run.yielded + (run.skipped if stream is None or run.per_batch is not None else stream.first)
        if run.per_batch is not None:
            position = {"base_batches": batches * run.per_batch}
        else:
            position = {"local_batches": batches} if stream is None else stream.consumed(run.yielded)
        return state | {
            "finished": False,
            "batches_yielded": batches,
            "position": position,
            **_dump_draws({} if stream is None else stream.record, run.begun_with),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `dump` made.

        Raises:
            DataError: the state is not one, or of a newer version.
        """
        missing = {"version", "epoch", "finished", "position", "batches_yielded", "ranks"} - set(state)
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
        if not state["finished"]:
            record: Record = {}
            if state.get("epoch_seed") is not None:
                record = {"seed": int(state["epoch_seed"])}
            elif state.get("epoch_generator") is not None:
                record = {"generator": state["epoch_generator"]}
            self.restored = Restored(
                record=record,
                begun_with=state.get("begun_with"),
                position=dict(state["position"]),
                batches=int(state["batches_yielded"]),
                ranks=int(state["ranks"]),
            )


def _dump_draws(record: Record, begun_with: Tensor | None) -> dict[str, Any]:
    return {
        "epoch_seed": record.get("seed"),
        "epoch_generator": record.get("generator"),
        "begun_with": begun_with,
    }
