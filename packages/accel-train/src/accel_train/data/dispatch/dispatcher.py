"""The loader where rank 0 reads for all, and every rank receives its own part only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_state.operations.scatter import Scatterer
from accel_state.world.process import PartialState
from accel_train.data.dispatch.cut import Round, cut_round
from accel_train.data.dispatch.wire import Envelope, Kind, receive, send, send_error, send_stop
from accel_train.data.epoch_start import make_source, open_with_workers, skip_batches, source_to_load
from accel_train.data.iteration import NOT_COUNTED, Iteration
from accel_train.data.iterators import LoaderIterator, TimedIterator, early_end
from accel_train.data.loader import PreparedLoader
from accel_train.data.position_checks import refuse_short
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.batches import Opening, SamplerPlan
from accel_train.data.sampling.index_streams import ArithmeticStream, IndexStream
from accel_train.data.sampling.permutations import OrderSource, Record
from accel_train.data.sampling.shared_seed import Alone
from accel_train.data.saved_position import Restored
from accel_train.ranks import Ranks

__all__ = ["DataLoaderDispatcher", "DispatchIteration", "is_plain"]


class DispatchIteration(Iteration):
    """One iteration over a dispatcher, on any rank."""

    __slots__ = (
        "drew_along",
        "first_base",
        "first_batch",
        "first_rng",
        "part",
        "per_batch",
        "scatterer",
        "several",
    )

    def __init__(self, randomness: Randomness, rng_at_start: dict[str, Any]) -> None:
        super().__init__(randomness, rng_at_start)
        self.part: Envelope | None = None
        """What rank 0 sent with the last returned batch, without the batch."""
        self.several = False
        """Whether other ranks take part, so that each batch comes with whether it is the last."""
        self.scatterer: Scatterer | None = None
        """Sends or receives batches, if other ranks take part."""
        self.per_batch = 1
        self.first_base = 0
        """Batches of the user's loader skipped before the first one."""
        self.first_rng: dict[str, Any] | None = None
        """The generators before the epoch's first batch was read, where it may be read again for padding."""
        self.first_batch: Any = None
        """The epoch's first batch, where it may be needed for padding and could not be read again."""
        self.drew_along = False
        """Whether this rank made the draws of the order that rank 0 iterates."""

    def known_to_end(self) -> bool:
        """Whether the last returned batch is known to be the last one, without reading ahead."""
        if self.several:
            return self.part is not None and self.part.last
        return super().known_to_end()

    def _is_last(self) -> bool:
        if self.several:
            return self.known_to_end()
        assert isinstance(self.source, _Reader), "one rank alone reads"
        self.found_end = not self.source.follows()
        return self.found_end

    def place(self) -> tuple[int, dict[str, Any]]:
        """Steps since the epoch began, and the position, which counts batches of the user's loader."""
        base = self.first_base + self.yielded * self.per_batch
        position: dict[str, Any] = {"base_batches": base}
        if self.stream is not None:
            position = {**self.stream.consumed(base - self.stream.first), **position}
            position.pop("samples", None)
        return self.skipped + self.yielded, position

    def draw(self, finished: bool) -> Record:
        """The random draws for the order, and how far it was drawn; only rank 0 knows its draws."""
        return {"along": True} if self.drew_along else super().draw(finished)

    def read_ahead(self) -> dict[str, Any]:
        """The state of items read ahead, and of the epoch's first batch, for padding.

        That is ``first_rng``, the generators with which it was read, where it may be read again; or the batch as
        ``first``.
        """
        ahead = super().read_ahead()
        if self.first_rng is not None:
            ahead["first_rng"] = self.first_rng
        if self.first_batch is not None and is_plain(self.first_batch):
            ahead["first"] = self.first_batch
        return ahead

    def position_of_source(self) -> dict[str, Any] | None:
        """The position of a dataset that keeps its own; without a first batch that is saved it is read again."""
        return super().position_of_source() if is_plain(self.first_batch) else None


class DataLoaderDispatcher(PreparedLoader):
    """A data loader that only rank 0 reads; it sends each rank its part. Each step is a collective of all ranks.

    Args:
        dataset: the dataset; only rank 0 reads it.
        split_batches: each batch is cut into one part per rank; otherwise a step takes one batch per rank.
        skip_batches: steps to skip at the start of every iteration.
        use_stateful_dataloader: as for `PreparedLoader`.
        _drop_last: whether an incomplete last round is dropped.
        _non_blocking: as for `PreparedLoader`.
        slice_fn: the user's function that cuts batches; see `prepare_data_loader`.
        torch_device_mesh: as for `PreparedLoader`.
        iteration: as for `PreparedLoader`.
        ranks: the ranks that get different parts; by default all ranks of the world.
        **kwargs: as for `PreparedLoader`.
    """

    make_iteration = DispatchIteration
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
        self.drops_last_round = _drop_last
        self.split_batches = split_batches
        self.slice_fn = slice_fn

    @property
    def sampler_batches_per_step(self) -> int:
        """Batches of the underlying loader that one step takes."""
        return 1 if self.split_batches else self.ranks.size

    @property
    def splits_batches(self) -> bool:
        """Whether a batch of the sampler, or stream, is cut into one part per rank."""
        return self.split_batches

    @property
    def position_unit(self) -> str:
        """Rank 0 counts batches of its sampler."""
        return "base_batches"

    def __iter__(self) -> Any:
        iterator, pulse = DispatchIterator(self), self.ledger.pulse
        return iterator if pulse is None else TimedIterator(iterator, pulse)

    def _steps(self) -> int:
        base, each = super()._steps(), self.sampler_batches_per_step
        return base // each if self._drop_last else -(-base // each)

    # Answers

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the last returned batch; None when that is not known."""
        part = self._part()
        return None if part is None else part.rows

    @property
    def total_rows(self) -> int | None:
        """Real rows of the last returned batch over all ranks; None when rank 0 did not count them."""
        part = self._part()
        return super().total_rows if part is None else part.real

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the last returned batch are real; None when all are."""
        part = self._part()
        return None if part is None else part.valid

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch, once it was returned; -1 before."""
        part = self._part()
        if part is None or not self.end_of_dataloader or part.real is None:
            return -1
        return part.real

    def _part(self) -> Envelope | None:
        current = self.current
        return current.part if isinstance(current, DispatchIteration) and current.yielded else None

    @property
    def batches_left(self) -> int | None:
        """Number of batches after the last returned one in the running iteration; see `PreparedLoader`.

        Rank 0 counts, and sends the number with each batch.
        """
        current = self.current
        if not isinstance(current, DispatchIteration) or not current.several or current.closed:
            return super().batches_left
        part = current.part
        if part is None or part.last:
            return None if part is None else 0
        if part.steps is None or part.steps < current.yielded:
            return None
        return part.steps - current.yielded

    def count_batches(self, iteration: Iteration) -> int | None:
        """Total number of steps of an iteration, by rank 0's data; None if not known."""
        if iteration.stream is not None:
            batches = iteration.stream.count()
        else:
            batches = self._stream_length()
            assert isinstance(iteration, DispatchIteration), "a dispatcher begins only such iterations"
            batches = None if batches is None else max(batches - iteration.first_base, 0)
        if batches is None:
            return None
        each = self.sampler_batches_per_step
        return batches // each if self._drop_last else -(-batches // each)

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
        return None if size is None else int(size) * self.sampler_batches_per_step

    # Beginning an iteration

    def open_source(self, iteration: Iteration, plan: SamplerPlan | None, restored: Restored | None) -> None:
        """Open what rank 0 reads, or the connection to rank 0."""
        assert isinstance(iteration, DispatchIteration), "a dispatcher begins only such iterations"
        iteration.several = self.ranks.world_size > 1
        # One on each rank, even where rank 0 then fails to open what it reads.
        iteration.scatterer = scatterer = Scatterer() if iteration.several else None
        resume = restored if self.use_stateful_dataloader else None
        self._count_skipped(iteration, resume)
        if self.ranks.rank == 0:
            try:
                iteration.source = self._read(iteration, plan, restored)
            except Exception as error:
                if self.ranks.world_size == 1:
                    raise
                # The other ranks will wait for the first batch, so they get the error in its place.
                iteration.stream = None
                iteration.source = _Reader(self, iteration, _unreadable(error), None)
            return
        # Rank 0's iterator draws a base seed here; all ranks draw alike.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        iteration.drew_along = drawn = restored is not None and bool(restored.draw)
        source = None if drawn or plan is None else plan.source
        assert scatterer is not None, "another rank than 0 is one of several"
        iteration.source = _Follower(scatterer, iteration, source)

    def _count_skipped(self, iteration: DispatchIteration, resume: Restored | None) -> None:
        """Set how many batches of the underlying loader, and how many steps, are skipped."""
        each = self.sampler_batches_per_step
        base = self.skip_batches * each
        if resume is not None:
            base = max(base, resume.position.get("base_batches", 0))
        iteration.per_batch = each
        iteration.first_base = base
        iteration.skipped = -(-base // each)

    def _read(
        self, iteration: DispatchIteration, plan: SamplerPlan | None, restored: Restored | None
    ) -> _Reader:
        indexes, base = self.indexes, iteration.first_base
        state = source_to_load(self, restored if self.use_stateful_dataloader else None)
        passed: list[Any] = []
        if indexes is None or plan is None:
            source = make_source(self, iteration, state)
            if state is None:
                done = skip_batches(source, base, passed)
                if restored is not None and restored.position.get("base_batches") == base:
                    refuse_short(restored, base, done, self.sampler_batches_per_step)
            if not (self.num_workers or self.asks_dataset):
                source = iteration.watch(source)
        else:
            opening = Opening(
                recorded=None if restored is None else restored.draw,
                reached=None if restored is None else restored.position,
                in_flight=self.num_workers * (self.prefetch_factor or 0) + self.sampler_batches_per_step,
                skip=base,
                later=iteration.randomness.as_afterwards,
                watch=iteration.watch,
            )
            iteration.stream = indexes.stream = plan.open(opening)
            there = restored is not None and restored.position.get("base_batches") == base
            try:
                source = open_with_workers(self, iteration, restored if there else None, state)
            finally:
                indexes.stream = None
        if base and restored is not None and "first" in restored.ahead:
            passed = [restored.ahead["first"]]
        reader = _Reader(self, iteration, source, passed[0] if passed else None)
        if restored is not None and restored.batches_yielded:
            self._read_again(reader, restored)
        return reader

    def _read_again(self, reader: _Reader, restored: Restored) -> None:
        """Draw and read ahead as far as the interrupted run had."""
        iteration = reader.iteration
        base = iteration.first_base
        iteration.first_rng = restored.ahead.get("first_rng")
        if iteration.stream is not None:
            iteration.stream.prime()
            passed = iteration.stream.passed
            if passed is not None and base == restored.position.get("base_batches"):
                refuse_short(restored, base, passed, self.sampler_batches_per_step)
        elif not base:
            reader.fetch()  # a stream may draw its order no earlier than it is read
        if "rng" in restored.ahead and base == restored.position.get("base_batches"):
            with reader.reading.as_of(restored.ahead["rng"]):
                reader.fetch(min(restored.ahead["batches"], self.sampler_batches_per_step + 1))

    def read_first(self, stream: IndexStream | None) -> Any:
        """Read the first batch of an epoch that was begun after it."""
        assert stream is not None, "a stream of samples keeps its first batch when it passes over it"
        indices = stream.first_batch()
        if not self._auto_collation:
            return self.collate_fn(self.dataset[indices])
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self.dataset[index] for index in indices]
        return self.collate_fn(samples)


class _Follower:
    """Any rank but 0: receives its part.

    Args:
        scatterer: receives messages.
        iteration: the iteration.
        source: the order that rank 0 draws, where its random draws are to be repeated so that generators stay in step.
    """

    def __init__(
        self, scatterer: Scatterer, iteration: DispatchIteration, source: OrderSource | None
    ) -> None:
        self._scatterer = scatterer
        self._iteration = iteration
        self._order = source

    def __iter__(self) -> _Follower:
        return self

    def __next__(self) -> Envelope:
        if not self._iteration.drew_along:
            self._iteration.drew_along = True
            if self._order is not None:
                self._order.draw(Alone(), None)
        envelope = receive(self._scatterer)
        if envelope.kind is Kind.STOP:
            raise StopIteration
        if envelope.kind is Kind.ERROR:
            raise envelope.batch
        return envelope


def _unreadable(error: Exception) -> Iterator[Any]:
    """A source that could not be opened: its first item is the error."""
    try:
        yield from ()
        raise error
    finally:
        del error  # its traceback holds this frame, which must not hold it in turn


class _Reader:
    """Rank 0: reads, cuts and sends."""

    def __init__(
        self, loader: DataLoaderDispatcher, iteration: DispatchIteration, source: Iterator[Any], first: Any
    ) -> None:
        self.iteration = iteration
        self._loader = loader
        self._source = source
        self._stream = stream = iteration.stream
        self._ranks = loader.ranks
        self._scatterer = iteration.scatterer
        randomness = iteration.randomness
        self.reading = randomness if randomness.everything else Randomness(randomness.own, True)
        # Reading ahead draws from this process's generators only when this process reads.
        self._reads_here = loader.num_workers == 0
        # For padding, the first batch cannot be read again identically by workers, or after the dataset advanced.
        self._keeps_first = loader.may_pad and (iteration.source_state is not None or not self._reads_here)
        self._per_step = loader.sampler_batches_per_step
        self._drop_last = loader.drops_last_round
        self._first = first
        self._passed = stream.first if stream is not None else 0
        self._steps: int | None = NOT_COUNTED
        self._taken = 0
        self._ahead: list[Any] = []
        self._failure: Exception | None = None
        self._over = False

    def __iter__(self) -> _Reader:
        return self

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
        if self.iteration.first_rng is None and self._stream is not None and self._reads_here:
            self._stream.begin()
            self.iteration.first_rng = self.reading.tree(self.reading.now())
        while len(batches) < self._per_step and self.fetch():
            batches.append(self._ahead.pop(0))
            self._taken += 1
        if not self._ahead:
            self.iteration.note_ahead(None, 0)
        if not batches or (self._drop_last and len(batches) < self._per_step):
            return None
        if self._first is None and not self._passed:
            self._first = batches[0]
        if self._keeps_first:
            self.iteration.first_batch = self._first
        if self._scatterer is not None and self._steps == NOT_COUNTED:
            self._steps = self._loader.count_batches(self.iteration)
        # One rank alone looks ahead only when asked; other ranks need the answer with the batch.
        last = self._scatterer is not None and not self.follows()
        cut: Round = cut_round(
            batches,
            self._first_batch,
            self._ranks.size,
            split=self._loader.split_batches,
            last=last,
            slice_fn=self._loader.slice_fn,
        )
        return [
            Envelope(Kind.BATCH, part, last, cut.real, cut.valid, rows, self._steps)
            for part, rows in zip(cut.parts, cut.rows, strict=True)
        ]

    def _first_batch(self) -> Any:
        if self._first is None:
            # Read for a second time, for padding: with the same draws, and without any for what comes later.
            reading = self.reading
            with reading.as_of(self.iteration.first_rng or reading.tree(reading.now())):
                self._first = self._loader.read_first(self._stream)
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
        iteration = self.iteration
        noted = iteration.drawn_ahead
        if noted is None and self._reads_here:
            noted = (self.reading.now(), 0)
        if not self._ahead and iteration.source_state is not None:
            iteration.before_ahead = iteration.source_state()
        enough = self.fetch(wanted)
        iteration.note_ahead(None if noted is None else noted[0], len(self._ahead) + (not enough))
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
        iteration = self._iteration
        assert isinstance(iteration, DispatchIteration), "a dispatcher begins only such iterations"
        try:
            envelope = next(self._source)
        except BaseException as error:
            self._close(exhausted=isinstance(error, StopIteration))
            raise
        batch, envelope.batch = envelope.batch, None
        if self._finish is not None:
            batch = self._finish(batch)
        iteration.part = envelope
        self._yielded(iteration, batch)
        return batch


def is_plain(batch: Any) -> bool:
    """Whether a batch consists of tensors and plain data only."""
    if type(batch) is dict:
        return all(isinstance(key, str) and is_plain(value) for key, value in batch.items())
    if type(batch) in (list, tuple):
        return all(is_plain(item) for item in batch)
    return batch is None or type(batch) in (torch.Tensor, bool, int, float, str, bytes)
