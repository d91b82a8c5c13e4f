"""The loader where rank 0 reads for all, and every rank receives its own part only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_state.communication.scatter import Scatterer
from accel_state.world.process import PartialState
from accel_train.data.dispatch_cut import Round, cut_round
from accel_train.data.dispatch_wire import Envelope, Kind, receive, send, send_error, send_stop
from accel_train.data.epoch import Restored, Run
from accel_train.data.iterators import LoaderIterator, early_end
from accel_train.data.loader import PreparedLoader
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.batches import Opening, arithmetic_source
from accel_train.data.sampling.index_streams import ArithmeticStream, IndexStream
from accel_train.data.sampling.shared_seed import Alone
from accel_train.ranks import Ranks

__all__ = ["DataLoaderDispatcher"]


class DataLoaderDispatcher(PreparedLoader):
    """A data loader that only rank 0 reads. Each step is collective: every rank must take it.

    Args:
        dataset: the dataset; only rank 0's is read.
        split_batches: each batch is cut into one part per rank; otherwise a step takes one batch per rank.
        skip_batches: steps left out at the start of every iteration.
        use_stateful_dataloader: as for `PreparedLoader`.
        _drop_last: whether an incomplete last round is dropped.
        _non_blocking: as for `PreparedLoader`.
        slice_fn: the user's way of cutting; see `prepare_data_loader`.
        torch_device_mesh: as for `PreparedLoader`.
        iteration: as for `PreparedLoader`.
        ranks: the ranks that get different parts; by default all ranks of the world.
        **kwargs: as for `PreparedLoader`.
    """

    skips_steps = True

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        if ranks is None:
            state = PartialState()
            ranks = Ranks.of_world(state.num_processes, state.process_index)
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            ranks=ranks,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn

    @property
    def base_batches_per_step(self) -> int:
        """Batches of the underlying loader that one step takes."""
        return 1 if self.split_batches else self.ranks.size

    def _base_batches_per_step(self) -> int:
        return self.base_batches_per_step

    def __iter__(self) -> Any:
        return DispatchIterator(self)

    def _steps(self) -> int:
        base, each = super()._steps(), self.base_batches_per_step
        return base // each if self._drop_last else -(-base // each)

    # Answers

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the batch handed out last; None when that is not known."""
        part = self._part()
        return None if part is None else part.rows

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the batch handed out last are real; None when all are."""
        part = self._part()
        return None if part is None else part.valid

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch, once it is handed out; -1 before."""
        part = self._part()
        if part is None or not self.end_of_dataloader or part.real is None:
            return -1
        return part.real

    def _part(self) -> Envelope | None:
        run = self._run
        return run.part if run is not None and run.yielded else None

    def _left_at_end(self, run: Run) -> bool:
        if self.ranks.world_size > 1:
            return run.part is not None and run.part.last
        return super()._left_at_end(run)

    @property
    def may_pad(self) -> bool:  # type: ignore[override]
        """Whether rows can be padding."""
        return self.ranks.size > 1 and not self._drop_last

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        size = self.batch_size
        if size is None:
            size = getattr(self._batch_sampler(), "batch_size", None)
        return None if size is None else int(size) * self.base_batches_per_step

    # Beginning an iteration

    def _open(self, run: Run) -> Any:
        restored = self.epoch_state.take()
        resume = restored if self.use_stateful_dataloader else None
        run.per_batch = self.base_batches_per_step
        begun_with = None if restored is None else restored.begun_with
        randomness = self._randomness()
        self._count_skipped(run, resume)
        with randomness.as_of(begun_with):
            self._begin_with(run, randomness, begun_with)
            if self.ranks.rank == 0:
                try:
                    return self._read(run, restored, randomness)
                except Exception as error:
                    if self.ranks.world_size == 1:
                        raise
                    # The other ranks will wait for the first batch, so they are told in its place.
                    run.stream = None
                    return _Reader(self, run, _Unreadable(error), randomness, None)
            # Rank 0's iterator draws a base seed here; all ranks draw alike.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        drawn = restored is not None and bool(restored.draw)
        run.drew_along = drawn
        return _Follower(Scatterer(), run, None if drawn else self._draw_along)

    def _draw_along(self) -> None:
        """Make the draws of the order that rank 0 makes."""
        if self.indexes is None:
            return
        source = arithmetic_source(self.indexes.sampler)
        if source is not None:
            source.draw(Alone(), None)

    def _count_skipped(self, run: Run, resume: Restored | None) -> None:
        """Set how many batches of the underlying loader, and how many steps, are left out."""
        each = self.base_batches_per_step
        base = self.skip_batches * each
        if resume is not None:
            base = max(base, resume.position.get("base_batches", 0))
        run.first_base = base
        run.skipped = -(-base // each)

    def _read(self, run: Run, restored: Restored | None, randomness: Randomness) -> _Reader:
        indexes, base = self.indexes, run.first_base
        passed: list[Any] = []
        if indexes is None:
            placed = self._place_source(restored if self.use_stateful_dataloader else None)
            source = self._torch_iterator()
            if not placed:
                self._skip(source, base, passed)
        else:
            opening = Opening(
                recorded=None if restored is None else restored.draw,
                reached=None if restored is None else restored.position,
                in_flight=self.num_workers * (self.prefetch_factor or 0) + self.base_batches_per_step,
                skip=base,
            )
            indexes.begin(opening)
            self._place_source(restored if self.use_stateful_dataloader else None)
            there = restored is not None and restored.position.get("base_batches") == base
            source = self._with_workers(run, restored if there else None)
            run.stream = indexes.take_stream()
        run.source = self._source_state()
        if base and restored is not None and "first" in restored.ahead:
            passed = [restored.ahead["first"]]
        reader = _Reader(self, run, source, randomness, passed[0] if passed else None)
        if restored is not None and restored.batches:
            self._read_again(reader, restored)
        return reader

    def _read_again(self, reader: _Reader, restored: Restored) -> None:
        """Draw and read as far ahead as the interrupted run had."""
        base = reader.run.first_base
        reader.run.first_with = restored.ahead.get("first_with")
        if reader.run.stream is not None:
            reader.run.stream.prime()
        elif not base:
            reader.fetch()  # a stream may draw its order no earlier than it is read
        if "with" in restored.ahead and base == restored.position.get("base_batches"):
            with reader.reading.as_of(restored.ahead["with"]):
                reader.fetch(restored.ahead["batches"])

    def _read_first(self, stream: IndexStream | None) -> Any:
        """Read the first batch of an epoch that was begun after it."""
        assert stream is not None, "a stream of samples keeps its first batch when it passes over it"
        indices = stream.first_batch()
        if not self._auto_collation:
            return self.collate_fn(self.dataset[indices])
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self.dataset[index] for index in indices]
        return self.collate_fn(samples)


class _Follower:
    """Another rank than 0: takes what comes."""

    def __init__(self, scatterer: Scatterer, run: Run, draw_along: Callable[[], None] | None) -> None:
        self._scatterer = scatterer
        self._run = run
        self._draw_along = draw_along

    def __next__(self) -> Envelope:
        if self._draw_along is not None:
            self._draw_along()
            self._draw_along = None
            self._run.drew_along = True
        envelope = receive(self._scatterer)
        if envelope.kind is Kind.STOP:
            raise StopIteration
        if envelope.kind is Kind.ERROR:
            raise envelope.batch
        return envelope

    def follows(self) -> bool:
        raise AssertionError("other ranks know the end from what rank 0 sends")


class _Unreadable:
    """A source that could not be opened: its first item is the error."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def __next__(self) -> Any:
        error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which must not hold it in turn


class _Reader:
    """Rank 0: reads, cuts and sends."""

    def __init__(
        self,
        loader: DataLoaderDispatcher,
        run: Run,
        source: Any,
        randomness: Randomness,
        first: Any,
    ) -> None:
        self.run = run
        self._source = source
        self._stream = stream = run.stream
        self._scatterer = Scatterer() if loader.ranks.world_size > 1 else None
        self.reading = randomness if randomness.everything else Randomness(randomness.own, True)
        self._reads_here = (
            loader.num_workers == 0
        )  # so that reading ahead draws from this process's generators
        # For padding, the first batch cannot be read again as it was by workers, or once the dataset went on.
        may_pad = loader.may_pad
        self._keeps_first = may_pad and (run.source is not None or not self._reads_here)
        self._ranks = loader.ranks
        self._per_step = loader.base_batches_per_step
        self._split = loader.split_batches
        self._drop_last = loader._drop_last
        self._slice_fn = loader.slice_fn
        self._first = first
        self._passed = stream.first if stream is not None else 0
        self._read_first = loader._read_first
        self._taken = 0
        self._ahead: list[Any] = []
        self._failure: Exception | None = None
        self._over = False

    def __next__(self) -> Envelope:
        scatterer = self._scatterer
        try:
            envelopes = self._round()
        except Exception as error:
            self._over = True
            if scatterer is not None:
                send_error(scatterer, self._ranks.world_size, error)
            raise
        if envelopes is None:
            if scatterer is not None:
                send_stop(scatterer, self._ranks.world_size)
            raise StopIteration
        if scatterer is not None:
            send(scatterer, [envelopes[index] for index in self._ranks.index_of])
        return envelopes[self._ranks.index]

    def _round(self) -> list[Envelope] | None:
        batches: list[Any] = []
        if self.run.first_with is None and self._stream is not None and self._reads_here:
            self._stream.begin()
            self.run.first_with = self.reading.tree(self.reading.now())
        while len(batches) < self._per_step and self.fetch():
            batches.append(self._ahead.pop(0))
            self._taken += 1
        if not self._ahead:
            self.run.read_ahead(None, 0)
        if not batches or (self._drop_last and len(batches) < self._per_step):
            return None
        if self._first is None and not self._passed:
            self._first = batches[0]
        if self._keeps_first:
            self.run.first_batch = self._first
        # One rank alone looks ahead only when asked; the others must be told with the batch.
        last = self._scatterer is not None and not self.follows()
        cut: Round = cut_round(
            batches,
            self._first_batch,
            self._ranks.size,
            split=self._split,
            last=last,
            slice_fn=self._slice_fn,
        )
        return [
            Envelope(Kind.BATCH, part, last, cut.real, cut.valid, rows)
            for part, rows in zip(cut.parts, cut.rows, strict=True)
        ]

    def _first_batch(self) -> Any:
        if self._first is None:
            # Read for a second time, for padding: with the same draws, and without any for what comes later.
            reading = self.reading
            with reading.as_of(self.run.first_with or reading.tree(reading.now())):
                self._first = self._read_first(self._stream)
        return self._first

    def follows(self) -> bool:
        """Whether another round follows. Counts where it can, and reads ahead where it must."""
        wanted = self._per_step if self._drop_last else 1
        stream = self._stream
        if isinstance(stream, ArithmeticStream):
            return stream.layout.batches - self._taken >= wanted
        if stream is not None and wanted == 1:
            return not stream.ends_at(self._taken)
        try:
            return self._read_ahead(wanted)
        except Exception as error:
            self._failure = error  # belongs to the next step
            return True

    def _read_ahead(self, wanted: int) -> bool:
        """Have `wanted` batches ready, and note with which draws they were read."""
        noted = self.run.looked_ahead
        if noted is None and self._reads_here:
            noted = (self.reading.now(), 0)
        if not self._ahead and self.run.source is not None:
            self.run.source_before = self.run.source()
        enough = self.fetch(wanted)
        self.run.read_ahead(None if noted is None else noted[0], len(self._ahead))
        return enough

    def fetch(self, wanted: int = 1) -> bool:
        """Have `wanted` batches ready; False when there are fewer."""
        while len(self._ahead) < wanted:
            if self._failure is not None:
                raise self._failure
            if self._over:
                return False
            try:
                self._ahead.append(next(self._source))
            except StopIteration as stop:
                early = early_end(self._stream, self._taken + len(self._ahead), self._ranks.world_size)
                if early is not None:
                    raise early from stop
                self._over = True
        return True


class DispatchIterator(LoaderIterator):
    """One iteration over a dispatcher, on any rank."""

    __slots__ = ()

    def __next__(self) -> Any:
        try:
            if self._failure is not None:
                self._raise_failure()
            envelope = self._held.pop() if self._held else next(self._source)
        except BaseException as error:
            self._close(exhausted=isinstance(error, StopIteration))
            raise
        batch, envelope.batch = envelope.batch, None
        if self._finish is not None:
            batch = self._finish(batch)
        run, loader = self._run, self._loader
        run.part = envelope
        run.yielded += 1
        if loader._run is not run:  # another iterator has begun, or yielded, in between
            loader._run = loader.epoch_state.run = run
        self._ledger.yielded(loader)
        return batch

    def at_end(self) -> bool:
        """Whether nothing follows the batch handed out last."""
        if self._loader.ranks.world_size > 1:
            return self._run.part is not None and self._run.part.last
        self._run.found_end = not self._source.follows()
        return self._run.found_end
