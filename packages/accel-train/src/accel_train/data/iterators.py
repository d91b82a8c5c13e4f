"""Iterators over prepared loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from accel_state.monitoring.heartbeat import DATA, FORWARD, OTHER, Heartbeat
from accel_train.data.epoch_start import begin_epoch
from accel_train.data.iteration import Iteration
from accel_train.data.loader import PreparedLoader
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.data.transfer import StreamTransfer
from accel_train.errors import DataError

__all__ = ["AheadIterator", "LoaderIterator", "TimedIterator", "early_end"]


class LoaderIterator:
    """One iteration over a prepared loader.

    A class and not a generator: creating it already begins the iteration, so that ``zip(a, b)`` begins
    both before either yields, and dropping it ends the iteration.
    """

    __slots__ = (
        "__weakref__",
        "_around",
        "_finish",
        "_iteration",
        "_ledger",
        "_live",
        "_loader",
        "_source",
        "_tagged",
    )

    def __init__(self, loader: PreparedLoader) -> None:
        self._live = False
        self._loader = loader
        self._ledger = loader.ledger
        self._finish = self._finishing(loader)
        self._tagged = loader.tagged
        self._around = loader.current
        self._iteration: Iteration | None = None
        self._ledger.begin(loader)
        self._live = True
        self._iteration = iteration = begin_epoch(loader)
        assert iteration.source is not None, "an iteration begins with a source"
        self._source = iteration.source

    def _finishing(self, loader: PreparedLoader) -> Callable[[Any], Any] | None:
        """What is done with a batch before it is returned; None: nothing."""
        move = self._move(loader)
        cut = loader.shard_batch
        if move is None or cut is None:
            return cut if move is None else move
        return lambda item: cut(move(item))

    def _move(self, loader: PreparedLoader) -> Callable[[Any], Any] | None:
        """How a batch gets to the device; None: it stays where it is."""
        return None if loader.transfer is None else loader.transfer.move

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        iteration = self._iteration
        assert iteration is not None
        if iteration.ahead:
            item = iteration.take_ahead()
        else:
            try:
                if iteration.failure is not None:
                    iteration.raise_failure()
                item = next(self._source)
            except StopIteration as stop:
                early = None
                if self._live:
                    early = early_end(iteration.stream, iteration.yielded, self._loader.ranks.world_size)
                self._close(exhausted=early is None)
                if early is not None:
                    raise early from stop
                raise
            except BaseException:
                self._close(exhausted=False)
                raise
        if self._tagged:
            iteration.real, item = item
        if self._finish is not None:
            item = self._finish(item)
        self._yielded(iteration, item)
        return item

    def _yielded(self, iteration: Iteration, batch: Any) -> None:
        loader = self._loader
        iteration.yielded += 1
        if loader.epoch_state.running is not iteration:  # another iterator has begun, or yielded, in between
            loader.epoch_state.go_on(iteration)
        loader.current = iteration
        self._ledger.yielded(loader, batch)

    def _close(self, exhausted: bool) -> None:
        if not self._live:
            return
        self._live = False
        loader, iteration = self._loader, self._iteration
        self._ledger.end(loader)
        if iteration is None:  # it could not begin
            return
        iteration.close(exhausted)
        if exhausted:
            loader.epoch_state.end(iteration)
        around, self._around = self._around, None
        # A loop within a loop over the same loader: the outer loop continues. An iterator that yielded nothing does not
        # count, because tqdm begins one that it never uses. Nor does one that is only kept, as for a first batch.
        if loader.current is iteration and around is not None and around.yielded and not around.closed:
            loader.current = around
            if exhausted or not iteration.yielded:
                loader.epoch_state.go_on(around)

    def close(self) -> None:
        """End the iteration without waiting for the iterator to be dropped; it yields nothing more."""
        self._close(exhausted=False)
        self._source = iter(())

    def __del__(self) -> None:
        if self._live:
            self._close(exhausted=False)


def early_end(stream: IndexStream | None, yielded: int, ranks: int) -> DataError | None:
    """The error for a loader that ends after `yielded` batches although its sampler has more; None if it has no more.

    A plain loader ends, without a word, when its dataset raises `StopIteration` for a sample. One process
    does as the plain loader; among several, the other ranks would wait for this one.
    """
    if ranks == 1 or stream is None or stream.ends_at(yielded):
        return None
    return DataError(
        f"Reading batch {yielded} (counted from 0) raised StopIteration, though the sampler yields that batch: the "
        "dataset or the collate function ended early. Raise another error there, or make the sampler end where "
        "the data ends."
    )


class AheadIterator(LoaderIterator):
    """Keeps the next batch on its way to the device while the current one is computed on."""

    __slots__ = ()

    def __init__(self, loader: PreparedLoader) -> None:
        super().__init__(loader)
        assert self._iteration is not None
        start = _stream(loader).start
        self._source = self._iteration.source = _Started(self._source, start, self._tagged)

    def _move(self, loader: PreparedLoader) -> Callable[[Any], Any] | None:
        return _stream(loader).finish

    def __next__(self) -> Any:
        batch = super().__next__()
        iteration = self._iteration
        assert iteration is not None
        stream = iteration.stream
        if iteration.closed:  # after an error, the script reads on
            return batch
        if not iteration.ahead and (stream is None or not stream.ends_at(iteration.yielded)):
            iteration.look_ahead()
        return batch


def _stream(loader: PreparedLoader) -> StreamTransfer:
    assert isinstance(loader.transfer, StreamTransfer), "copies can begin before their batch is asked for"
    return loader.transfer


class _Closable(Protocol):
    """An iterator that can be ended before it is dropped."""

    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class TimedIterator:
    """An iterator that reports when a batch is waited for."""

    __slots__ = ("_iterator", "_pulse")

    def __init__(self, iterator: _Closable, pulse: Heartbeat) -> None:
        self._iterator = iterator
        self._pulse = pulse

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        self._pulse.enter(DATA)
        after = OTHER  # than the last batch
        try:
            item = next(self._iterator)
            after = FORWARD
        finally:
            self._pulse.enter(after)
        return item

    def close(self) -> None:
        """See ``LoaderIterator``."""
        self._iterator.close()


class _Started:
    """Items on their way to the device.

    Args:
        source: what is read.
        start: begins a copy.
        tagged: whether items are `Tagged` batches.
    """

    def __init__(self, source: Iterator[Any], start: Callable[[Any], Any], tagged: bool) -> None:
        self._source = source
        self._start = start
        self._tagged = tagged

    def __iter__(self) -> _Started:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        if self._tagged:
            return item._replace(batch=self._start(item.batch))
        return self._start(item)
