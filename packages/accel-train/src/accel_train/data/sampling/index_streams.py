"""Iterators over one rank's index batches for one epoch.

Each answers, for the batch with a given number, whether it is the last and how many of its rows are real.
Those that compute know; those that iterate a user's sampler look one index batch ahead, and only when asked.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from accel_train.data.sampling.layout import BatchLayout, clip_rows
from accel_train.data.sampling.permutations import Later, Order, OrderSource, Record
from accel_train.data.sampling.shared_seed import Sharing
from accel_train.errors import DataError

__all__ = [
    "ALL_ROWS",
    "ArithmeticStream",
    "IndexStream",
    "RoundStream",
    "SamplerReader",
    "SingleIndexStream",
    "SingleStream",
]

ALL_ROWS = 2**62
"""More rows than any batch has: "all rows", where another rank's number of rows is not known."""


class IndexStream(ABC):
    """One epoch of one rank."""

    record: Record = {}
    """What was drawn to get the order; empty until something is."""
    first: int = 0
    """Number of this rank's first batch here, counted from the beginning of the epoch."""
    passed: int | None = None
    """How many items of an iterated sampler lead to the first batch, once they were read."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def drawn(self) -> Record:
        """The random draws for the order so far."""
        return self.record

    @abstractmethod
    def begin(self) -> None:
        """Draw the epoch's random numbers now; the caller requests the first batch next."""

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch of indices."""

    @abstractmethod
    def ends_at(self, yielded: int) -> bool:
        """Whether there are exactly `yielded` batches. May draw the next index batch."""

    def ends_anywhere_at(self, yielded: int) -> bool | None:
        """Whether any rank has no more than `yielded` batches; None when that is not known."""
        return None

    @abstractmethod
    def count(self) -> int | None:
        """Total number of batches of this stream; None if the sampler has no length. Draws nothing."""

    @abstractmethod
    def rows(self, batch_index: int) -> int | None:
        """Rows of a batch that was returned already; None when no longer known."""

    @abstractmethod
    def valid_rows(self, batch_index: int) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of such a batch are real; None for all."""

    def total_rows(self, batch_index: int) -> int | None:
        """Real rows of such a batch over all ranks; None when only this rank's are known."""
        return None

    def first_batch(self) -> Any:
        """The indices of the epoch's first batch; None when they are not known."""
        return None

    def prime(self) -> None:
        """Repeat the random draws that precede the first batch now, and not when it is requested."""
        return

    @abstractmethod
    def consumed(self, yielded: int) -> dict[str, Any]:
        """The position after `yielded` batches, in ``samples`` or in the sampler's ``base_batches``.

        A sampler that is iterated adds ``pulled``, how far it was read, ``ended``, whether to its end, and ``ahead``,
        what was found beyond the position.
        """

    def known_to_end(self, yielded: int) -> bool:
        """Whether it is known, without drawing, that there are exactly `yielded` batches."""
        return False

    def finish(self) -> None:
        """Make the random draws of the epoch's end, on a copy: this stream does not change."""
        return


class ArithmeticStream(IndexStream):
    """Slices of an order that is drawn at once, when the first batch is asked for.

    Args:
        layout: which slices.
        source: draws the order.
        sharing: makes the draw the same on all ranks.
        recorded: an earlier draw to be used again.
        later: for draws that the interrupted run had not made.
    """

    def __init__(
        self,
        layout: BatchLayout,
        source: OrderSource,
        sharing: Sharing,
        recorded: Record | None = None,
        later: Later = contextlib.nullcontext,
    ) -> None:
        self.layout = layout
        self.record = {}
        self.first = layout.start // layout.stride
        self._source = source
        self._sharing = sharing
        self._recorded = recorded
        self._later = later
        self._order: Order | None = None
        self._ready: Iterator[list[int]] = iter(())
        self._rounds_cut = 0
        self._full = layout.full
        self._tail_span = layout.tail_span()
        self._batches = layout.batches
        self._done = False

    def __next__(self) -> list[int]:
        for batch in self._ready:
            return batch
        return self._refill()

    def _refill(self) -> list[int]:
        order = self._begin()
        layout, cut = self.layout, self._rounds_cut
        rounds = min(order.block, self._full - cut)
        if rounds > 0:
            self._rounds_cut = cut + rounds
            low = layout.rank * layout.batch
            start = layout.start + cut * layout.stride
            self._ready = iter(order.rows(start, rounds, layout.stride, low, low + layout.batch))
            return next(self._ready)
        order.exhaust()
        span, self._tail_span = self._tail_span, None
        if span is not None:
            return self._tail(order, *span)
        if not self._done:
            self._done = True
            order.finished()
        raise StopIteration

    def _begin(self) -> Order:
        if self._order is None:
            recorded = self._recorded or {}
            with contextlib.nullcontext() if recorded else self._later():
                self._order, self.record = self._source.draw(self._sharing, self._recorded)
            # A generator may have other users. Workers ask for indices further ahead than the interrupted run did.
            # A seed was set just now, in the loader's own generator too, and all draws belong to it.
            later = contextlib.nullcontext if "seed" in recorded else self._later
            self._order.catch_up(recorded.get("drawn", 0), recorded.get("exhausted", False), later)
        return self._order

    def begin(self) -> None:
        """Draw the order."""
        self._begin()

    def prime(self) -> None:
        """Make the draws again that an interrupted run made from a generator that may have other users."""
        if self._recorded and "generator" in self._recorded:
            self._begin()

    def drawn(self) -> Record:
        """The random draws so far."""
        if self._order is None or "generator" not in self.record:
            return self.record  # a seed determines everything
        return self.record | self._order.progress()

    def known_to_end(self, yielded: int) -> bool:
        """Whether there are exactly `yielded` batches; arithmetic always knows."""
        return self.ends_at(yielded)

    def finish(self) -> None:
        """Make the random draws of the epoch's end, on a copy: this stream does not change."""
        if self._order is not None:
            copy.copy(self._order).exhaust()

    def _tail(self, order: Order, low: int, high: int) -> list[int]:
        layout = self.layout
        base = layout.start + layout.full * layout.stride
        real = order.take(base + min(low, layout.tail), base + min(high, layout.tail))
        missing = range(max(low, layout.tail), high)
        if not missing:
            return real
        first = order.take(0, min(layout.total, layout.stride))
        return real + [first[layout.padding(offset)] for offset in missing]

    def first_batch(self) -> Any:
        """The indices of the epoch's first batch."""
        return None if self._order is None else self._order.take(0, min(self.layout.total, self.layout.batch))

    def ends_at(self, yielded: int) -> bool:
        """Whether there are exactly `yielded` batches."""
        return yielded >= self._batches

    def count(self) -> int:
        """Total number of batches of this stream."""
        return self._batches

    def ends_anywhere_at(self, yielded: int) -> bool:
        """Whether any rank has no more than `yielded` batches: the last rank has the fewest."""
        return yielded >= replace(self.layout, rank=self.layout.ranks - 1).batches

    def rows(self, batch_index: int) -> int | None:
        """Rows of a batch."""
        return self.layout.rows(batch_index)

    def valid_rows(self, batch_index: int) -> tuple[int, ...] | None:
        """Real rows per rank."""
        return self.layout.valid_rows(batch_index)

    def total_rows(self, batch_index: int) -> int:
        """Real rows over all ranks."""
        layout = self.layout
        if batch_index < self._full:
            return layout.stride
        return layout.consumed(batch_index + 1) - layout.consumed(batch_index)

    def consumed(self, yielded: int) -> dict[str, Any]:
        """The position after `yielded` batches."""
        return {"samples": self.layout.consumed(yielded)}


class SamplerReader(Iterator[Any]):
    """The iterator of a user's sampler, which remembers what was read last.

    Args:
        iterator: the iterator.
        position: how many items an interrupted run had returned.
        ahead: the items that it had read beyond; they take the place of what the sampler yields now, since a sampler
            that draws while it is read cannot draw them again.
        pulled: how many items it had read in all; None when that is not known.
        ended: whether it had found the end, where a sampler may draw once more.
        keep: how many items can be read and not yet returned.
        later: for draws that the interrupted run had not made.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        *,
        position: int = 0,
        ahead: list[Any],
        pulled: int | None,
        ended: bool = False,
        keep: int,
        later: Later = contextlib.nullcontext,
    ) -> None:
        self._iterator = iterator
        self._known = {position + place: item for place, item in enumerate(ahead)}
        self._wanted = pulled
        self._wants_end = ended
        self._later = later
        self._queue: deque[Any] = deque()
        self._recent: deque[Any] = deque(maxlen=keep)
        self.pulled = 0  # from the sampler
        self.taken = 0  # from here
        self.ended = False

    def __next__(self) -> Any:
        item = self._queue.popleft() if self._queue else self._pull()
        self.taken += 1
        self._recent.append(item)
        return item

    def _pull(self) -> Any:
        is_new = self._wanted is not None and self.pulled >= self._wanted and not self._wants_end
        with self._later() if is_new else contextlib.nullcontext():
            try:
                item = next(self._iterator)
            except StopIteration:
                self.ended = True
                raise
        item = self._known.pop(self.pulled, item)
        self.pulled += 1
        return item

    def catch_up(self) -> bool:
        """Read as far as the interrupted run had read; False when that is not known."""
        if self._wanted is None:
            return False
        while not self.ended and (self.pulled < self._wanted or self._wants_end):
            try:
                self._queue.append(self._pull())
            except StopIteration:
                break
        return True

    def beyond(self, position: int) -> dict[str, Any]:
        """How far was read, and the items after the first `position`, where they are plain numbers."""
        unread = [*self._recent, *self._queue]
        count = max(self.pulled - position, 0)
        items = unread[len(unread) - count :]
        return {
            "pulled": self.pulled,
            "ended": self.ended,
            "ahead": items if len(items) == count and _plain(items) else [],
        }


def _plain(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return all(_plain(part) for part in item)
    return isinstance(item, (int, str))


_Facts = tuple[int | None, tuple[int, ...] | None, int | None]
_Produced = tuple[Any, int | None, tuple[int, ...] | None, int | None]
_UNKNOWN: _Facts = (None, None, None)


class SingleIndexStream(ArithmeticStream):
    """An order yielded by single indices, for loaders that do not batch: each sample is a batch."""

    def __next__(self) -> Any:
        return super().__next__()[0]

    def rows(self, batch_index: int) -> int | None:
        """Rows of a batch."""
        return None

    def valid_rows(self, batch_index: int) -> tuple[int, ...] | None:
        """Real rows per rank."""
        valid = super().valid_rows(batch_index)
        return None if valid is None else tuple(ALL_ROWS if count else 0 for count in valid)


class _Iterated(IndexStream):
    """A stream over an iterated sampler that remembers the facts about recent batches.

    Args:
        base: the sampler.
        in_flight: how many batches can be drawn and not yet handed to the user (worker prefetch).
        length: how many batches an epoch has by the sampler's length; None if it has none.
    """

    def __init__(self, base: SamplerReader, in_flight: int, length: Callable[[], int | None]) -> None:
        self._length = length
        self.record = {}
        self._reader = base
        self._remembered = in_flight + 3  # … the user's own, the one held back, and the one being drawn
        self._drawn = 0  # batches found, the one held back included
        self._held: list[Any] = []
        self._exhausted = False
        self._facts: dict[int, _Facts] = {}

    @abstractmethod
    def _produce(self) -> _Produced:
        """The next batch, its rows, the real rows per rank, and those of all ranks together."""

    def _pull(self) -> Any:
        batch, rows, valid, total = self._produce()
        self._facts[self._drawn] = (rows, valid, total)
        self._facts.pop(self._drawn - self._remembered, None)
        self._drawn += 1
        return batch

    def __next__(self) -> Any:
        if self._held:
            return self._held.pop()
        if self._exhausted:
            raise StopIteration
        try:
            return self._pull()
        except StopIteration:
            self._exhausted = True
            raise

    def ends_at(self, yielded: int) -> bool:
        """Whether there are exactly `yielded` batches."""
        if yielded < self._drawn:
            return False
        if not self._exhausted:
            try:
                self._held.append(self._pull())
            except StopIteration:
                self._exhausted = True
        return yielded >= self._drawn

    def count(self) -> int | None:
        """How many batches this stream has, by the sampler's length."""
        length = self._length()
        return None if length is None else max(length - self.first, 0)

    def known_to_end(self, yielded: int) -> bool:
        """Whether the sampler was found to have no more."""
        return self._exhausted and yielded >= self._drawn

    def begin(self) -> None:
        """Draw the first batch, and keep it."""
        self.ends_at(self._drawn)

    def prime(self) -> None:
        # A sampler may draw as late as its first batch, so one batch is drawn and kept if nothing better is known.
        self._pass_over()
        self.passed = self._reader.taken
        if not self._reader.catch_up():
            self.begin()

    @abstractmethod
    def _pass_over(self) -> None:
        """Read what was returned before."""

    def rows(self, batch_index: int) -> int | None:
        """Rows of a batch."""
        return self._facts.get(batch_index, _UNKNOWN)[0]

    def valid_rows(self, batch_index: int) -> tuple[int, ...] | None:
        """Real rows per rank."""
        return self._facts.get(batch_index, _UNKNOWN)[1]

    def total_rows(self, batch_index: int) -> int | None:
        """Real rows over all ranks."""
        return self._facts.get(batch_index, _UNKNOWN)[2]


class SingleStream(_Iterated):
    """The user's sampler unchanged: one rank, or a sampler that is sharded already.

    Args:
        base: the sampler.
        skip: batches to skip first.
        real_rows: ``real_rows(batch_index)`` for a sharded sampler that is known to pad.
        in_flight: as in `_Iterated`.
        length: as in `_Iterated`.
    """

    def __init__(
        self,
        base: SamplerReader,
        *,
        skip: int = 0,
        real_rows: Callable[[int], tuple[int, ...] | None] | None = None,
        in_flight: int = 0,
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(base, in_flight, length)
        self._skip = self.first = skip
        self._first_batch: Any = None
        self._real_rows = real_rows

    def _pass_over(self) -> None:
        skip, self._skip = self._skip, 0
        for passed in itertools.islice(self._reader, skip):
            if self._first_batch is None:
                self._first_batch = passed

    def _produce(self) -> _Produced:
        self._pass_over()
        batch = next(self._reader)
        if self._first_batch is None:
            self._first_batch = batch
        valid = None if self._real_rows is None else self._real_rows(self.first + self._drawn)
        return batch, _size(batch), valid, None

    def first_batch(self) -> Any:
        """The indices of the epoch's first batch."""
        return self._first_batch

    def consumed(self, yielded: int) -> dict[str, Any]:
        """The position after `yielded` batches."""
        return _position(self.first + yielded, self._reader)


class RoundStream(_Iterated):
    """Whole batches of an iterated batch sampler in rounds of one per rank, or slices of each.

    Args:
        base: the base batch sampler.
        ranks: number of ranks.
        rank: this rank.
        split: each base batch is cut into one slice per rank; otherwise each rank takes one base batch of
            a round.
        batch_size: the size of a full base batch, or None when it varies.
        drop_last: an incomplete last round (or, when split, an incomplete last batch) is dropped.
        even: it is completed with the first samples or batches; otherwise ranks may get less, or nothing.
        record: what was drawn for the base batch sampler.
        skip_base: base batches to skip before the first round; the first of them still provide the
            padding.
        in_flight: as in `_Iterated`.
        length: as in `_Iterated`.
    """

    def __init__(
        self,
        base: SamplerReader,
        *,
        ranks: int,
        rank: int,
        split: bool,
        batch_size: int | None,
        drop_last: bool,
        even: bool,
        record: Record,
        skip_base: int = 0,
        in_flight: int = 0,
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(base, in_flight, length)
        self.record = record
        self._ranks = ranks
        self._rank = rank
        self._split = split
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._even = even
        self._skip_base = self._skipped_base = skip_base
        self.first = skip_base // (1 if split else ranks)
        self._uniform = batch_size is not None
        self._first: list[Any] = []  # the first round, for padding
        self._ahead: list[Any] = []  # at most one base batch beyond the current round
        self._base_ended = False

    def _base(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        if self._base_ended:
            raise StopIteration
        try:
            batch = next(self._reader)
        except StopIteration:
            self._base_ended = True
            raise
        if len(self._first) < (1 if self._split else self._ranks):
            self._first.append(batch)
        return batch

    def _at_end(self) -> bool:
        if not self._ahead:
            try:
                self._ahead.append(self._base())
            except StopIteration:
                return True
        return False

    def _full(self, batch: Any) -> bool:
        return self._batch_size is None or _size(batch) == self._batch_size

    def _oversized(self, batch: Any) -> bool:
        """Whether a batch has more samples than the batch sampler's `batch_size`."""
        size = _size(batch)
        return size is not None and self._batch_size is not None and size > self._batch_size

    def _pass_over(self) -> None:
        with contextlib.suppress(StopIteration):
            while self._skip_base:
                self._skip_base -= 1
                self._base()
        self._skip_base = 0

    def _produce(self) -> _Produced:
        self._pass_over()
        return self._slice() if self._split else self._round()

    def _round(self) -> _Produced:
        batches: list[Any] = []
        while len(batches) < self._ranks:
            try:
                batches.append(self._base())
            except StopIteration:
                break
        if not batches:
            raise StopIteration
        short = next((i for i, batch in enumerate(batches) if not self._full(batch)), None)
        complete = len(batches) == self._ranks
        last = not complete or (short is not None and self._at_end())
        by_samples = self._uniform and (
            short is None or (short == len(batches) - 1 and not self._oversized(batches[short]))
        )
        self._uniform = self._uniform and short is None
        if not last or (complete and not by_samples):
            return self._whole(batches)
        if self._drop_last:
            raise StopIteration
        if self._even and by_samples:
            return self._completed([index for batch in batches for index in batch])
        return self._whole(batches)

    def _whole(self, batches: list[Any]) -> _Produced:
        """This rank's batch of a round that is not cut up; ranks without one repeat the first, or stop."""
        if self._rank < len(batches):
            mine = batches[self._rank]
        elif self._even:
            mine = self._first[(self._rank - len(batches)) % len(self._first)]
        else:
            raise StopIteration
        missing = self._ranks - len(batches)
        sizes = [_size(batch) for batch in batches]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        if not self._even or not missing:
            return mine, _size(mine), None, total
        valid = tuple(ALL_ROWS if size is None else size for size in sizes)
        return mine, _size(mine), valid + (0,) * missing, total

    def _slice(self) -> _Produced:
        batch = self._base()
        assert self._batch_size is not None, "split batches need a batch size; checked at preparation"
        each = self._batch_size // self._ranks
        if self._full(batch):
            return batch[self._rank * each : (self._rank + 1) * each], each, None, len(batch)
        if self._oversized(batch):
            raise DataError(
                f"split_batches=True cuts batches of {self._batch_size} samples, as the batch sampler's batch_size "
                f"says, but it yielded one of {len(batch)}. Let batch_size be the size of the largest batch, or use "
                "split_batches=False."
            )
        if self._drop_last and self._at_end():
            raise StopIteration
        if self._even:
            return self._completed(list(batch))
        if len(batch) <= each * (self._ranks - 1) and not self._at_end():
            raise DataError(
                f"split_batches=True with even_batches=False gives the last of {self._ranks} ranks nothing of a batch "
                f"of {len(batch)} samples, where batch_size is {self._batch_size}. Only the last batch of an epoch may "
                "be so small. Use even_batches=True, or split_batches=False."
            )
        mine = batch[self._rank * each : (self._rank + 1) * each]
        if not mine:
            raise StopIteration
        return mine, len(mine), None, len(batch)

    def _completed(self, real: list[Any]) -> _Produced:
        """This rank's part of the incomplete round `real`, completed with the first samples of the epoch."""
        assert self._batch_size is not None, "only rounds of equal batches are completed by samples"
        each = self._batch_size // self._ranks if self._split else self._batch_size
        first = [index for batch in self._first for index in batch]
        low = self._rank * each
        mine = [
            real[at] if at < len(real) else first[(at - len(real)) % len(first)]
            for at in range(low, low + each)
        ]
        valid = None if len(real) == each * self._ranks else clip_rows(len(real), each, self._ranks)
        return mine, each, valid, len(real)

    def consumed(self, yielded: int) -> dict[str, Any]:
        """The position after `yielded` batches."""
        position = self._skipped_base + yielded * (1 if self._split else self._ranks)
        return _position(min(position, self._reader.pulled), self._reader)


def _position(base_batches: int, reader: SamplerReader) -> dict[str, Any]:
    return {"base_batches": base_batches, **reader.beyond(base_batches)}


def _size(batch: Any) -> int | None:
    try:
        return len(batch)
    except TypeError:  # one index instead of a batch: the dataset decides how many rows it becomes
        return None
