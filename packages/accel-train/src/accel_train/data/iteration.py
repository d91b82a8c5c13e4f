"""One iteration over a prepared loader: its stream, its source, its random states, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_train.data.reading_states import ReadingStates
from accel_train.data.rng_replay import Randomness
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
        "closed",
        "drew_along",
        "ended",
        "epoch",
        "failure",
        "first_base",
        "first_batch",
        "first_rng",
        "found_end",
        "held",
        "looked_ahead",
        "notes_rng",
        "per_batch",
        "randomness",
        "reading",
        "real",
        "restored",
        "rng_at_start",
        "skipped",
        "source",
        "source_before",
        "source_state",
        "states",
        "stream",
        "stride",
        "total",
        "workers",
        "yielded",
    )

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
        self.workers: WorkerStates | None = None
        """What worker processes reported of their generators."""
        self.source_state: Callable[[], dict[str, Any] | None] | None = None
        """The position of a dataset that keeps its own."""
        self.source_before: dict[str, Any] | None = None
        """The same before batches were read ahead."""
        self.yielded = 0
        """Batches handed to the user."""
        self.skipped = 0
        """Batches skipped before the first one, where the stream does not count them."""
        self.first_base = 0
        """The same in batches of the user's loader, where one batch here takes several."""
        self.per_batch: int | None = None
        """Batches of the user's loader that one batch here takes, where it is not one."""
        self.stride: int | None = None
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        self.total: int | None = NOT_COUNTED
        """Batches of this iteration; None when that is not known."""
        self.held: list[Any] = []
        """The next batch, where it was read ahead; at most one."""
        self.failure: BaseException | None = None
        """What reading ahead raised."""
        self.notes_rng = False
        """Whether reading ahead draws from this process's generators."""
        self.looked_ahead: tuple[Any, int] | None = None
        """The generators before batches were read ahead in this process, and how many these are; the end counts."""
        self.found_end = False
        """Reading ahead found nothing after the last returned batch."""
        self.ended = False
        """Exhausted: the iterator has raised `StopIteration`."""
        self.closed = False
        """Over, for whatever reason."""
        self.real: int | None = None
        """Real samples in the last returned global batch, where the batch itself carries the number."""
        self.first_rng: dict[str, Any] | None = None
        """The generators before the epoch's first batch was read, where it may be read again for padding."""
        self.first_batch: Any = None
        """The epoch's first batch, where it may be needed for padding and could not be read again."""
        self.restored: Any = None
        """The loaded state that it began with."""
        self.drew_along = False
        """Whether this rank made the draws of the order that another rank iterates."""

    def at_end(self) -> bool:
        """Whether nothing follows the last returned batch. Reads ahead where the end cannot be counted."""
        if self.ended or not self.yielded:
            return self.ended
        if self.closed:
            return self.known_to_end()
        return self._is_last()

    def _is_last(self) -> bool:
        if self.held:
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
            self.source_before = None if self.source_state is None else self.source_state()
            try:
                self.held.append(next(self.source))
                self.read_ahead(rng, 1)
            except StopIteration:
                self.failure = StopIteration()  # without a traceback, which would keep the iterator alive
                self.found_end = True
                self.read_ahead(rng, 1)  # samples that fill no batch were read all the same
            except BaseException as error:
                self.failure = error
        return not isinstance(self.failure, StopIteration)

    def _rng_now(self) -> Any:
        if self.reading is None:
            return self.randomness.now()
        with self.reading:
            return self.randomness.now()

    def raise_failure(self) -> None:
        """Raise what reading ahead raised."""
        failure, self.failure = self.failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, which must not hold it in turn

    def read_ahead(self, generators: Any, batches: int) -> None:
        """Note that `batches` were read ahead, the end counted, with which generators (None: in other processes)."""
        self.looked_ahead = None if generators is None or not batches else (generators, batches)
        if not batches:
            self.source_before = None

    def close(self, exhausted: bool) -> None:
        """The iteration is over; what it read from is released."""
        self.closed = True
        self.ended = self.ended or exhausted
        self.source = self.failure = None
        self.held.clear()

    # What is saved

    def place(self) -> tuple[int, dict[str, Any]]:
        """Batches since the epoch began, and the position after them."""
        stream = self.stream
        if self.per_batch is None:
            if stream is None:
                batches = self.skipped + self.yielded
                return batches, {"local_batches": batches, "samples_per_batch": self.stride}
            return stream.first + self.yielded, stream.consumed(self.yielded)
        base = self.first_base + self.yielded * self.per_batch
        position: dict[str, Any] = {"base_batches": base}
        if stream is not None:
            position = {**stream.consumed(base - stream.first), **position}
            position.pop("samples", None)  # rank 0 counts batches
        return self.skipped + self.yielded, position

    def draw(self, finished: bool) -> Record:
        """What was drawn for the order, and how far.

        Args:
            finished: whether the last returned batch was the last of its epoch.
        """
        if self.drew_along:
            return {"along": True}
        draw: Record = {} if self.stream is None else dict(self.stream.drawn())
        if finished and "exhausted" in draw:
            draw["exhausted"] = True  # the generators are saved in their states after the end
        return draw

    def ahead(self) -> dict[str, Any]:
        """What was read ahead: how many ``batches``, with which ``rng``.

        And for padding ``first_rng``, the generators with which the epoch's first batch was read, where it may be read
        again, or that batch as ``first``.
        """
        ahead: dict[str, Any] = {} if self.first_rng is None else {"first_rng": self.first_rng}
        if self.looked_ahead is not None:
            raw, batches = self.looked_ahead
            ahead |= {"batches": batches, "rng": Randomness(self.randomness.own, True).tree(raw)}
        if self.first_batch is not None and is_plain(self.first_batch):
            ahead["first"] = self.first_batch
        return ahead

    def position_of_source(self) -> dict[str, Any] | None:
        """The position of a dataset that keeps its own; None if there is none, or it could not be used alone."""
        if self.source_state is None or not is_plain(self.first_batch):
            return None  # without the first batch the stream must be read again
        return self.source_before or self.source_state()

    def states_of_workers(self) -> dict[str, Any] | None:
        """The generators of worker processes after the last returned batch."""
        return None if self.workers is None else self.workers.dump(self.yielded * (self.per_batch or 1))


def is_plain(batch: Any) -> bool:
    """Whether a batch consists of tensors and plain data only."""
    if type(batch) is dict:
        return all(isinstance(key, str) and is_plain(value) for key, value in batch.items())
    if type(batch) in (list, tuple):
        return all(is_plain(item) for item in batch)
    return batch is None or type(batch) in (torch.Tensor, bool, int, float, str, bytes)
