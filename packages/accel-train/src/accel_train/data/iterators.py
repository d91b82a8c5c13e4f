"""Iterators over prepared loaders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from accel_train.data.epoch import Run
from accel_train.data.loader import PreparedLoader
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.errors import DataError

__all__ = ["AheadIterator", "LoaderIterator"]


class LoaderIterator:
    """One iteration over a prepared loader.

    A class and not a generator: creating it already begins the iteration, so that ``zip(a, b)`` begins
    both before either yields, and dropping it ends the iteration.
    """

    __slots__ = (
        "__weakref__",
        "_around",
        "_closed",
        "_failure",
        "_finish",
        "_held",
        "_ledger",
        "_loader",
        "_notes_draws",
        "_run",
        "_source",
        "_tagged",
    )

    def __init__(self, loader: PreparedLoader) -> None:
        self._closed = True
        self._loader = loader
        self._ledger = loader.ledger
        self._held: list[Any] = []
        self._failure: BaseException | None = None
        self._finish: Callable[[Any], Any] | None = None
        if loader.transfer is not None:
            self._finish = loader.transfer.finish
        self._tagged = loader.tagged
        self._around = loader._run
        self._run = run = Run()
        run.iterator = weakref.ref(self)
        loader._synchronize()
        loader.begin()
        self._closed = False
        loader._run = loader.epoch_state.run = run
        loader.set_epoch(loader.iteration)
        self._source = loader._open(run)
        # Reading ahead draws from this process's generators only when this process reads.
        self._notes_draws = run.stream is None and loader.num_workers == 0

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self._held:
            item = self._held.pop()
            self._run.read_ahead(None, 0)
        else:
            try:
                if self._failure is not None:
                    self._raise_failure()
                item = self._fetch()
            except StopIteration as stop:
                early = early_end(self._run.stream, self._run.yielded, self._loader.ranks.world_size)
                self._close(exhausted=early is None)
                if early is not None:
                    raise early from stop
                raise
            except BaseException:
                self._close(exhausted=False)
                raise
        if self._tagged:
            self._run.real, item = item
        if self._finish is not None:
            item = self._finish(item)
        run, loader = self._run, self._loader
        run.yielded += 1
        if loader._run is not run:  # another iterator has begun, or yielded, in between
            loader._run = loader.epoch_state.run = run
        self._ledger.yielded(loader)
        return item

    def _fetch(self) -> Any:
        return next(self._source)

    def at_end(self) -> bool:
        """Whether nothing follows the batch handed out last."""
        if self._held:
            return False
        stream = self._run.stream
        if stream is not None:
            return stream.ends_at(self._run.yielded)
        return not self._look_ahead()

    def _look_ahead(self) -> bool:
        """Fetch the next item and keep it; False at the end. A failure is an item, raised by the next step."""
        if self._failure is None:
            run = self._run
            now = self._loader._randomness().now() if self._notes_draws else None
            run.source_before = None if run.source is None else run.source()
            try:
                self._held.append(self._fetch())
                run.read_ahead(now, 1)
            except StopIteration:
                self._failure = StopIteration()  # without a traceback, which would keep this iterator alive
                run.found_end = True
            except BaseException as error:
                self._failure = error
        return not isinstance(self._failure, StopIteration)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, which must not hold it in turn

    def _close(self, exhausted: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._loader.end()
        if exhausted:
            self._run.ended = True
            self._loader.epoch_state.iteration += 1
        around, self._around = self._around, None
        if self._loader._run is self._run and around is not None and around.live:
            self._loader._run = self._loader.epoch_state.run = around  # a loop within a loop over one loader

    def close(self) -> None:
        """End the iteration without waiting for the iterator to be dropped."""
        self._close(exhausted=False)

    def __del__(self) -> None:
        if not self._closed:
            self._close(exhausted=False)


def early_end(stream: IndexStream | None, yielded: int, ranks: int) -> DataError | None:
    """What to raise when a loader ends after `yielded` batches although its sampler has more; None if it has not.

    A plain loader ends, without a word, when its dataset raises `StopIteration` for a sample. One process
    does as the plain loader; among several, the other ranks would wait for this one.
    """
    if ranks == 1 or stream is None or stream.ends_at(yielded):
        return None
    return DataError(
        f"Reading batch {yielded} (counted from 0) raised StopIteration, though the sampler yields that batch: the "
        "dataset or the collate function ended early. Raise another error there, or let the sampler end where "
        "the data ends."
    )


class AheadIterator(LoaderIterator):
    """Keeps the next batch on its way to the device while the current one is computed on."""

    __slots__ = ("_start",)

    def __init__(self, loader: PreparedLoader) -> None:
        assert loader.transfer is not None
        self._start = loader.transfer.start
        super().__init__(loader)

    def __next__(self) -> Any:
        batch = super().__next__()
        stream = self._run.stream
        if not self._held and (stream is None or not stream.ends_at(self._run.yielded)):
            self._look_ahead()
        return batch

    def _fetch(self) -> Any:
        item = next(self._source)
        if self._tagged:
            return item._replace(batch=self._start(item.batch))
        return self._start(item)
