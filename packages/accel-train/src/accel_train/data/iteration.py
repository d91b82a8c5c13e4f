"""One iteration over a prepared loader: a rank's position in its data, and items read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accel_train.data.reading_random_states import ReadingStates
from accel_train.data.rng_replay import Randomness, SharedDraws
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.data.sampling.permutations import Record
from accel_train.data.workers import WorkerStates

__all__ = ["NOT_COUNTED", "Iteration"]

NOT_COUNTED = -1
"""Placeholder for a number of batches that was not counted yet."""


class Iteration:
    """One iteration over a prepared loader.

    It holds no reference to the loader, which refers to it for as long as no newer one has begun.

    Args:
        randomness: the generators that reading can draw from.
        rng_at_start: their states before torch's iterator, and the samplers, drew from them.
    """

    __slots__ = (
        "ahead",
        "before_ahead",
        "closed",
        "drawn_ahead",
        "ended",
        "epoch",
        "failure",
        "found_end",
        "notes_rng",
        "randomness",
        "reading",
        "real",
        "restored",
        "rng_at_start",
        "skipped",
        "source",
        "source_state",
        "states",
        "stream",
        "stride",
        "total",
        "watched",
        "workers",
        "yielded",
    )

    per_batch: int = 1
    """Batches of the user's loader that one batch here takes."""

    def __init__(self, randomness: Randomness, rng_at_start: dict[str, Any]) -> None:
        self.randomness = randomness
        self.rng_at_start = rng_at_start
        self.epoch = 0
        """The number of its epoch."""
        self.reading: ReadingStates | None = None
        """Random states for everything that reads, where several ranks read the same samples."""
        self.states: ReadingStates | None = None
        """Random states with which samples are fetched in this process; None: its own."""
        self.stream: IndexStream | None = None
        """The index batches of a map-style dataset."""
        self.source: Iterator[Any] | None = None
        """What batches come from; None once the iteration is over."""
        self.watched: SharedDraws | None = None
        """What is read in this process, and again by a run that continues."""
        self.workers: WorkerStates | None = None
        """What worker processes reported of their generators."""
        self.source_state: Callable[[], dict[str, Any] | None] | None = None
        """The position of a dataset that keeps its own."""
        # At most one item is read and not returned yet: a batch, an error, or the end.
        self.ahead: list[Any] = []
        """The next batch."""
        self.failure: BaseException | None = None
        """What reading ahead raised; `StopIteration` at the end."""
        self.found_end = False
        """Whether the source had nothing after the last returned batch."""
        self.drawn_ahead: tuple[Any, int] | None = None
        """The generators before it, and how many batches were read with them in this process; the end counts."""
        self.before_ahead: dict[str, Any] | None = None
        """The position, before it, of a dataset that keeps its own."""
        self.yielded = 0
        """Batches handed to the user."""
        self.skipped = 0
        """Batches skipped before the first one, where the stream does not count them."""
        self.stride: int | None = None
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        self.total: int | None = NOT_COUNTED
        """Batches of this iteration; None when that is not known."""
        self.notes_rng = False
        """Whether reading ahead draws from this process's generators."""
        self.ended = False
        """Exhausted: the iterator has raised `StopIteration`."""
        self.closed = False
        """Over, for whatever reason."""
        self.real: int | None = None
        """Real samples in the last returned global batch, where the batch itself carries the number."""
        self.restored: Any = None
        """The loaded state that it began with."""

    def watch(self, items: Iterator[Any]) -> SharedDraws:
        """Note whether other code draws from the generators from which reading these items draws."""
        self.watched = SharedDraws(items)
        return self.watched

    def at_end(self) -> bool:
        """Whether nothing follows the last returned batch. Reads ahead where the end cannot be counted."""
        if self.ended or not self.yielded:
            return self.ended
        if self.closed:
            return self.known_to_end()
        return self._is_last()

    def _is_last(self) -> bool:
        if self.ahead:
            return False
        if self.stream is None:
            return not self.look_ahead()
        if self.reading is None:
            return self.stream.ends_at(self.yielded)
        with self.reading:
            return self.stream.ends_at(self.yielded)

    def known_to_end(self) -> bool:
        """Whether the last returned batch is known to be the last one, without reading ahead."""
        return self.found_end or (self.stream is not None and self.stream.known_to_end(self.yielded))

    def look_ahead(self) -> bool:
        """Fetch the next item and keep it; False at the end. A failure is an item, raised by the next step."""
        if self.failure is None:
            assert self.source is not None, "only a running iteration reads ahead"
            rng = self._rng_now() if self.notes_rng else None
            self.before_ahead = None if self.source_state is None else self.source_state()
            try:
                self.ahead.append(next(self.source))
                self.note_ahead(rng, 1)
            except StopIteration:
                self.failure = StopIteration()  # without a traceback, which would keep the iterator alive
                self.found_end = True
                self.note_ahead(rng, 1)  # samples that fill no batch were read all the same
            except BaseException as error:
                self.failure = error
        return not isinstance(self.failure, StopIteration)

    def note_ahead(self, generators: Any, batches: int) -> None:
        """Note that `batches` are read ahead, the end counted, with which generators (None: in other processes)."""
        self.drawn_ahead = None if generators is None or not batches else (generators, batches)
        if not batches:
            self.before_ahead = None

    def take_ahead(self) -> Any:
        """The batch that was read ahead, which is returned now."""
        batch = self.ahead.pop()
        self.note_ahead(None, 0)
        return batch

    def raise_failure(self) -> None:
        """Raise what reading ahead raised."""
        failure, self.failure = self.failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, which must not hold it in turn

    def _rng_now(self) -> Any:
        if self.reading is None:
            return self.randomness.now()
        with self.reading:
            return self.randomness.now()

    def close(self, exhausted: bool) -> None:
        """The iteration is over; what it read from is released."""
        self.closed = True
        self.ended = self.ended or exhausted
        self.source = self.failure = None
        self.ahead.clear()

    # What is saved

    def place(self) -> tuple[int, dict[str, Any]]:
        """Batches since the epoch began, and the position after them."""
        stream = self.stream
        if stream is None:
            batches = self.skipped + self.yielded
            return batches, {"local_batches": batches, "samples_per_batch": self.stride}
        return stream.first + self.yielded, stream.consumed(self.yielded)

    def draw(self, finished: bool) -> Record:
        """The random draws for the order, and how far it was drawn.

        Args:
            finished: whether the last returned batch was the last of its epoch.
        """
        draw: Record = {} if self.stream is None else dict(self.stream.drawn())
        if finished and "exhausted" in draw:
            draw["exhausted"] = True  # the generators are saved in their states after the end
        return draw

    def read_ahead(self) -> dict[str, Any]:
        """The state of items read ahead: number of ``batches``, and their ``rng``."""
        if self.drawn_ahead is None:
            return {}
        raw, batches = self.drawn_ahead
        return {"batches": batches, "rng": Randomness(self.randomness.own, True).tree(raw)}

    def position_of_source(self) -> dict[str, Any] | None:
        """The position of a dataset that keeps its own; None if there is none, or it could not be used alone."""
        return None if self.source_state is None else self.before_ahead or self.source_state()

    def states_of_workers(self) -> dict[str, Any] | None:
        """The generators of worker processes after the last returned batch."""
        return None if self.workers is None else self.workers.dump(self.yielded * self.per_batch)
