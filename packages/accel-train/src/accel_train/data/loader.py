"""What all prepared loaders have in common: their epochs, and what they answer about the last batch."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_state.errors import NotAvailableError
from accel_state.seeding import synchronize_rng_states
from accel_train.data.active_loaders import LoaderLedger
from accel_train.data.epoch import Epoch, Restored, Run
from accel_train.data.rng_replay import Randomness, generators_of
from accel_train.data.sampling.batches import (
    Opening,
    ShardedBatchSampler,
    SkipBatchSampler,
    arithmetic_source,
    open_stream,
)
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.data.sampling.samplers import innermost_sampler, loader_options, samplers_of
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.shared_seed import Sharing, sharing_for
from accel_train.data.stateful import loader_class, says_where_it_is
from accel_train.data.transfer import DirectTransfer, Transfer
from accel_train.data.workers import (
    Denoting,
    Ending,
    NotingCollate,
    TakeOver,
    WorkerNotes,
    end_workers_with,
)
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["DataLoaderStateMixin", "Indexes", "PreparedLoader"]


class DataLoaderStateMixin:
    """Telling the ledger when an iteration begins and ends.

    Attributes:
        ledger: the ledger of the `Accelerator` that the loader belongs to.
    """

    ledger: LoaderLedger

    def begin(self) -> None:
        """An iteration begins."""
        self.ledger.begin(self)

    def end(self) -> None:
        """An iteration is over."""
        self.ledger.end(self)


class Indexes:
    """What torch's iterator iterates in place of the batch sampler: it remembers its stream."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.opening = Opening()
        self.opened = False
        """Whether an epoch is being begun; one stream serves it, however often it is asked for."""
        self.stream: IndexStream | None = None

    def __iter__(self) -> Iterator[Any]:
        # torchdata's iterator begins twice when it continues.
        if self.stream is None or not self.opened:
            self.stream = open_stream(self.sampler, self.opening)
        return self.stream

    def __len__(self) -> int:
        return len(self.sampler)

    def over(self, sampler: Any) -> Indexes:
        """The same for another sampler."""
        return Indexes(sampler)

    def __getstate__(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "opening": Opening(), "opened": False, "stream": None}

    def begin(self, opening: Opening) -> None:
        """An epoch begins so."""
        self.opening, self.opened, self.stream = opening, True, None

    def take_stream(self) -> IndexStream | None:
        """The epoch's stream, which is its iterator's from now on."""
        stream, self.stream = self.stream, None
        self.opening, self.opened = Opening(), False
        return stream


class PreparedLoader(DataLoaderStateMixin, DataLoader[Any]):
    """A `torch.utils.data.DataLoader` that knows its place among the ranks; base of the two prepared kinds.

    Args:
        dataset: the dataset, or this rank's shard of it.
        device: where batches are moved; None leaves them.
        rng_types: generators made equal on all ranks at each epoch: "torch", "cuda", "generator", …
        synchronized_generator: the generator meant by "generator".
        skip_batches: batches to leave out at the start of every iteration.
        use_stateful_dataloader: whether a loaded state continues inside the epoch.
        _drop_last: whether the original loader dropped an incomplete last batch.
        _non_blocking: whether the move to the device overlaps with the host.
        torch_device_mesh: kept for reference.
        iteration: epochs that were iterated before.
        ledger: where to report; by default one of its own.
        ranks: the ranks that read different samples; by default this one alone.
        **kwargs: as for `torch.utils.data.DataLoader`.
    """

    _is_accelerate_prepared: bool = False
    """The mark of everything that an `Accelerator` prepared, for other libraries' code that looks for it."""
    skips_steps: bool = False
    """Whether `skip_batches` counts for map-style datasets, too; otherwise their batch sampler skips."""
    tagged: bool = False
    """Whether torch's iterator yields `Tagged` batches."""
    transfer: Transfer | None = None
    may_pad: bool = False
    """Whether rows can be padding."""
    may_be_uneven: bool = False
    """Whether ranks can hold different numbers of batches."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        ledger: LoaderLedger | None = None,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = None if device is None else torch.device(device)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self.torch_device_mesh = torch_device_mesh
        self.ledger = LoaderLedger() if ledger is None else ledger
        self.ranks = Ranks() if ranks is None else ranks
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.epoch_state = Epoch(iteration)
        self._sharing: Sharing = sharing_for(self.ranks)
        self._run: Run | None = None
        self.transfer = self._make_transfer()
        is_map_style = self._dataset_kind == 0
        self.indexes = Indexes(super()._index_sampler) if is_map_style else None
        self._find_generators()
        self.asks_dataset = use_stateful_dataloader and says_where_it_is(dataset)
        self._source_to_load: dict[str, Any] | None = None
        self._stateful: Any = None
        self._seedless = self._workers_ran = False
        self._ending: Ending | None = None
        if self.asks_dataset:
            loader_class(dataset)  # says now if it is not installed

    # Torch's hooks

    def __len__(self) -> int:
        return max(self._steps() - self.skip_batches, 0)

    def _steps(self) -> int:
        """Steps of an epoch, the skipped ones included."""
        return super().__len__()

    @property
    def _index_sampler(self) -> Any:
        # Torch's own constructor may ask before there is one.
        indexes = self.__dict__.get("indexes")
        return super()._index_sampler if indexes is None else indexes

    # Answers about the batch handed out last

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch handed out last is the last one.

        For an iterable dataset the next batch is fetched to find out, and kept for the next step.
        """
        run = self._run
        if run is None or run.yielded == 0:
            return run is not None and run.ended
        if run.ended:
            return True
        iterator = run.iterator() if run.iterator is not None else None
        return self._left_at_end(run) if iterator is None else bool(iterator.at_end())

    @property
    def batches_left(self) -> int | None:
        """Batches to come after the one handed out last; None when that is not known."""
        return None

    @property
    def ends_on_any_rank(self) -> bool | None:
        """Whether the batch handed out last is the last one of some rank; None when that is not known."""
        if not self.may_be_uneven:
            return self.end_of_dataloader
        run = self._run
        return None if run is None or run.stream is None else run.stream.ends_anywhere_at(run.yielded)

    def _left_at_end(self, run: Run) -> bool:
        """Whether the batch handed out last is known to be the last one, without looking ahead."""
        return run.found_end or (run.stream is not None and run.stream.known_to_end(run.yielded))

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the batch handed out last; None when that is not known."""
        run = self._run
        if run is None or run.stream is None or not run.yielded or not self._auto_collation:
            return None
        return run.stream.rows(run.yielded - 1)

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the batch handed out last are real; None when all are.

        A number above the number of rows means all of them.
        """
        run = self._run
        if run is None or not run.yielded:
            return None
        return None if run.stream is None else run.stream.valid_rows(run.yielded - 1)

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch of an epoch: 0 when it is full, -1 when unknown or dropped."""
        stride = self.total_batch_size
        if stride is None or self._drops_last():
            return -1
        try:
            total = self._epoch_length()
        except (TypeError, NotImplementedError):  # the dataset or its sampler has no length
            return -1
        return total % stride

    def _epoch_length(self) -> int:
        sampler = self.get_sampler()
        if self.indexes is not None and sampler is not None:
            return len(sampler)
        return self.total_dataset_length

    def _drops_last(self) -> bool:
        batch_sampler = self._batch_sampler()
        return bool(self.drop_last or getattr(batch_sampler, "drop_last", False))

    def _batch_sampler(self) -> Any:
        """The batch sampler, also when it was given as the sampler of a loader that does not batch."""
        return self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        size = getattr(self._batch_sampler(), "batch_size", None)
        return None if size is None else int(size) * self.ranks.size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset over all ranks."""
        total = getattr(self.dataset, "total_length", None)
        return len(self.dataset) if total is None else int(total)  # type: ignore[arg-type]

    # Epochs

    @property
    def iteration(self) -> int:
        """Number of the next epoch, or of the one being iterated."""
        return self.epoch_state.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.epoch_state.iteration = value

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch, and tell every sampler that wants to know, or else the dataset."""
        self.epoch_state.choose(epoch)
        told = False
        for sampler in samplers_of(self):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
                told = True
        if not told and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """The sampler that yields single indices, at the bottom of all batch samplers."""
        return innermost_sampler(self.batch_sampler, self.sampler)

    def set_sampler(self, sampler: Any) -> None:
        """Replace that sampler."""
        outer: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        parent = None
        while isinstance(outer, ShardedBatchSampler | SkipBatchSampler):
            parent, outer = outer, outer.batch_sampler
        if isinstance(outer, BatchSampler) or hasattr(outer, "sampler"):
            outer.sampler = sampler
        elif parent is not None:
            parent.batch_sampler = sampler
        if not isinstance(self.sampler, BatchSampler):
            self.__dict__["sampler"] = sampler  # torch forbids the assignment after construction
            if self.batch_sampler is None and self.indexes is not None:
                self.indexes.sampler = sampler
        self._find_generators()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: epoch, the epoch's draw, and position, as plain data and tensors.

        The state counts the batches that were handed out. An epoch whose last batch is known to be out counts as over.
        Asking changes nothing: the loader goes on as if it had not been asked.
        """
        run = self.epoch_state.run  # which may be that of a loader that skips
        finished = run is not None and run.yielded > 0 and self._left_at_end(run)
        state = self.epoch_state.dump(self.ranks.size, finished)
        sampler = self.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            state["sampler_seed"] = sampler.initial_seed
        randomness = self._randomness()
        if run is not None and not run.ended:
            state["ahead"] = _dump_ahead(run, Randomness(self._own_generators, True))
            if not _is_plain(run.first_batch):
                state["source"] = None  # a state without it cannot be saved, so the stream will be read again
        state["generators"] = self._generators_after(run if finished else None, randomness)
        state["workers_run"] = self._workers_run() or self._workers_ran
        state["samplers"] = [sampler.state_dict() for sampler in self._stateful_samplers()]
        return state

    def _generators_after(self, over: Run | None, randomness: Randomness) -> list[Any]:
        """The loader's own generators; with the draws that come with the end of an epoch whose last batch is out."""
        if over is None or over.ended or over.stream is None:
            return randomness.own_trees()
        now = randomness.now()
        try:
            over.stream.finish()
            return randomness.own_trees()
        finally:
            randomness.put_back(now)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a saved state.

        The next iterator of the saved epoch uses the saved draw, so it has the order of the interrupted one. It also
        continues at the saved position if the loader was prepared with ``use_stateful_dataloader=True``;
        otherwise it starts at the first batch, and `skip_first_batches` gets to the position.

        `iteration` is then the number of the epoch to go on with: the next one, if the last batch of the saved epoch
        was known to be out. `set_epoch` goes back to the saved one, of which then nothing is left.

        Raises:
            DataError: `state_dict` does not come from a prepared loader, or from another kind of loader.
        """
        self.epoch_state.load(state_dict)
        self._run = None
        self._workers_ran = bool(state_dict.get("workers_run", False))
        sampler = self.get_sampler()
        if isinstance(sampler, SeedableRandomSampler) and "sampler_seed" in state_dict:
            sampler.initial_seed = int(state_dict["sampler_seed"])
        self._randomness().set_own(state_dict.get("generators", []))
        for stateful, saved in zip(self._stateful_samplers(), state_dict.get("samplers", []), strict=False):
            stateful.load_state_dict(saved)

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether a loader prepared like this one can go on where `state_dict` was saved; changes nothing.

        Raises:
            NotAvailableError: the position means nothing for this number of ranks.
        """
        if self.use_stateful_dataloader and "local_batches" in state_dict.get("position", {}):
            self._steps_of_stream(state_dict["position"], int(state_dict["ranks"]))

    def steps_to(self, position: dict[str, Any]) -> float | None:
        """How many batches of this rank lead to a saved position; None where that cannot be told."""
        if "samples" in position:
            return None if self.total_batch_size is None else position["samples"] / self.total_batch_size
        if "local_batches" in position:
            before, now = position["samples_per_batch"], self._stream_stride()
            return None if before is None or now is None else position["local_batches"] * before / now
        return position["base_batches"] / self._base_batches_per_step() if position else None

    def _base_batches_per_step(self) -> int:
        """Batches of the sampler that one step of all ranks takes."""
        return 1

    def _find_generators(self) -> None:
        """Note the generators that belong to the loader: its own, its samplers' and its dataset's."""
        chosen = [sampler for sampler in samplers_of(self) if not isinstance(sampler, SeedableRandomSampler)]
        datasets: list[Any] = []
        dataset: Any = self.dataset
        while dataset is not None:
            datasets.append(dataset)
            dataset = getattr(dataset, "dataset", None)
        self._own_generators: list[Any] = generators_of(
            [self.generator, self.synchronized_generator], [*chosen, *datasets]
        )

    def _randomness(self) -> Randomness:
        indexes = self.indexes
        return Randomness(self._own_generators, indexes is None or arithmetic_source(indexes.sampler) is None)

    def _stateful_samplers(self) -> list[Any]:
        """Samplers of the user that say where they are."""
        return [
            sampler
            for sampler in samplers_of(self)
            if callable(getattr(sampler, "state_dict", None))
            and callable(getattr(sampler, "load_state_dict", None))
        ]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_iterator"] = None
        state["_stateful"] = state["_ending"] = None
        state["_run"] = None
        state["transfer"] = None
        state["_sharing"] = None
        state["ranks"] = replace(self.ranks, group=None)  # a process group belongs to its process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_sharing"] = sharing_for(self.ranks)
        self.__dict__["transfer"] = self._make_transfer()
        self._find_generators()

    def _make_transfer(self) -> Transfer | None:
        return None if self.device is None else DirectTransfer(self.device, self._non_blocking)

    # Beginning an iteration

    def _synchronize(self) -> None:
        waiting = self.epoch_state.waiting()
        if waiting is not None and waiting.ranks == self.ranks.size:
            return  # the interrupted run did, when it began the epoch
        if self.ranks.world_size > 1 and self.rng_types and not self._sharing.alone:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)

    def _open(self, run: Run) -> Any:
        """Torch's iterator for a new epoch; fills in `run`."""
        restored = self.epoch_state.take()
        resume = restored if self.use_stateful_dataloader else None
        begun_with = None if restored is None else restored.begun_with
        randomness = self._randomness()
        with randomness.as_of(begun_with):
            self._begin_with(run, randomness, begun_with)
            if self.indexes is None:
                source = self._open_stream(run, restored, resume, randomness)
            else:
                source = self._open_indexes(self.indexes, run, restored, resume)
        return source

    def _begin_with(self, run: Run, randomness: Randomness, begun_with: dict[str, Any] | None) -> None:
        """Note with what the epoch begins, or begin with what was noted."""
        samplers = self._stateful_samplers()
        for sampler, saved in zip(samplers, (begun_with or {}).get("samplers", []), strict=False):
            sampler.load_state_dict(saved)
        run.begun_with = randomness.tree(randomness.now())
        running = self._workers_run()
        run.begun_with["workers_run"] = running
        # Torch draws a base seed when it starts workers; where they ran already, the interrupted run drew none.
        ran = self._workers_ran if begun_with is None else begun_with.get("workers_run", False)
        self._seedless, self._workers_ran = ran and not running, False
        run.begun_with["samplers"] = [sampler.state_dict() for sampler in samplers]

    def _open_indexes(
        self, indexes: Indexes, run: Run, restored: Restored | None, resume: Restored | None
    ) -> Any:
        opening = Opening(
            recorded=None if restored is None else restored.draw,
            position=None if resume is None else resume.position,
            reached=None if restored is None else restored.position,
            sharing=self._sharing,
            in_flight=self.num_workers * (self.prefetch_factor or 0),
            skip=self.skip_batches,
        )
        indexes.begin(opening)
        self._place_source(resume)
        there = resume is not None or (restored is not None and restored.batches == self._skipped_batches())
        source = self._with_workers(run, restored if there else None)
        run.stream, run.source = indexes.take_stream(), self._source_state()
        if restored is not None and restored.batches and run.stream is not None:
            run.stream.prime()
        return source

    def _open_stream(
        self, run: Run, restored: Restored | None, resume: Restored | None, randomness: Randomness
    ) -> Any:
        batches = self._batches_to_skip(resume)
        placed = self._place_source(resume)
        source = self._torch_iterator()
        run.source = self._source_state()
        run.stride = self._stream_stride()
        run.skipped = batches if placed else self._skip(source, batches)
        if restored is None or not restored.batches:
            return source
        if not run.skipped:
            # A stream may draw its order no earlier than it is read, so one item is read now and kept.
            return itertools.chain(list(itertools.islice(source, 1)), source)
        if "with" in restored.ahead and restored.ranks == self.ranks.size and run.skipped == restored.batches:
            with randomness.as_of(restored.ahead["with"]):
                return itertools.chain(list(itertools.islice(source, restored.ahead["batches"])), source)
        return source

    def _skipped_batches(self) -> int:
        """Batches that samplers leave out of this loader."""
        sampler, skipped = self._batch_sampler() or self.sampler, self.skip_batches
        while isinstance(sampler, SkipBatchSampler):
            sampler, skipped = sampler.batch_sampler, skipped + sampler.skip_batches
        return skipped

    def _with_workers(self, run: Run, restored: Restored | None) -> Any:
        """Torch's iterator over a map-style dataset, whose workers report their generators and go on with them."""
        count = self.num_workers
        if not count or self.asks_dataset or self.persistent_workers:
            return self._torch_iterator()
        saved = None if restored is None or restored.ranks != self.ranks.size else restored.workers
        if saved is not None and saved["count"] != count:
            if saved["states"]:
                warnings.warn(
                    f"The state was saved with {saved['count']} workers, this loader has {count}: the random numbers "
                    "that the dataset draws in workers start anew.",
                    stacklevel=5,
                )
            saved = None
        turn, states = (0, {}) if saved is None else (saved["turn"], saved["states"])
        run.workers = WorkerNotes(count, 2 * (run.per_batch or 1) + 2, turn, states)
        collate, initialise = self.collate_fn, self.worker_init_fn
        self.collate_fn = NotingCollate(collate)
        if saved is not None:
            self.worker_init_fn = TakeOver(turn, count, states, initialise)
        try:
            return Denoting(self._torch_iterator(), run.workers)
        finally:
            self.collate_fn, self.worker_init_fn = collate, initialise

    def _workers_run(self) -> bool:
        """Whether there are workers that were kept from an earlier epoch."""
        kept = self._stateful if self.asks_dataset else self
        return self.persistent_workers and kept is not None and kept._iterator is not None

    def _torch_iterator(self) -> Any:
        if not self._seedless:
            return self._make_iterator()
        generator, self.generator = self.generator, torch.Generator()
        try:
            return self._make_iterator()
        finally:
            self.generator, self._seedless = generator, False

    def _make_iterator(self) -> Any:
        iterator = self._make_stateful_iterator() if self.asks_dataset else super().__iter__()
        if self.asks_dataset or self.persistent_workers:
            self._ending = end_workers_with(self, iterator, self._ending)
        return iterator

    def _make_stateful_iterator(self) -> Any:
        if self._stateful is None or not self.persistent_workers:
            kind = loader_class(self.dataset)
            self._stateful = kind(self.dataset, snapshot_every_n_steps=1, **self._stateful_options())
        if self._source_to_load is not None:
            self._stateful.load_state_dict(self._source_to_load)
            self._source_to_load = None
        return iter(self._stateful)

    def _stateful_options(self) -> dict[str, Any]:
        """What torchdata's loader is built with, to read what this one would."""
        options = loader_options(self)
        if self.indexes is None:
            return options | {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self._auto_collation:
            return options | {"batch_sampler": self.indexes}
        return options | {"batch_size": None, "sampler": self.indexes}

    def _place_source(self, resume: Restored | None) -> bool:
        """Let the next iterator begin where the dataset said it was; False if it has to be read up to there."""
        fits = resume is not None and resume.source is not None and resume.ranks == self.ranks.size
        self._source_to_load = resume.source if resume is not None and fits and self.asks_dataset else None
        return self._source_to_load is not None

    def _source_state(self) -> Callable[[], dict[str, Any]] | None:
        stateful = self._stateful
        return None if stateful is None else lambda: copy.deepcopy(stateful.state_dict())

    def _stream_stride(self) -> int | None:
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        return self.batch_size or 1

    def _batches_to_skip(self, resume: Restored | None) -> int:
        """How many batches of an iterable dataset are read and left out."""
        if resume is None:
            return self.skip_batches
        if "local_batches" not in resume.position:
            raise DataError(
                f"The saved position counts {', '.join(sorted(resume.position)) or 'nothing'}, but this loader's "
                "stream counts local_batches: it is not the kind of loader that the state was saved with. Prepare "
                "the same loader, or do not load its state."
            )
        return max(self._steps_of_stream(resume.position, resume.ranks), self.skip_batches)

    def _steps_of_stream(self, position: dict[str, Any], ranks: int) -> int:
        """A position in a stream, in batches of this number of ranks.

        Raises:
            NotAvailableError: it is between two of them.
        """
        batches: int = position["local_batches"]
        if ranks == self.ranks.size or not batches:
            return batches
        before, now = position["samples_per_batch"], self._stream_stride()
        advice = f"Continue with {ranks} ranks, or without use_stateful_dataloader."
        if before is None or now is None:
            raise NotAvailableError(
                f"This stream was left after {batches} batches on each of {ranks} ranks, each of which read a part of "
                f"its own; {self.ranks.size} ranks would read other parts. {advice}"
            )
        steps, rest = divmod(batches * int(before), now)
        workers = max(self.num_workers, 1)
        if rest or batches % workers or steps % workers:
            raise NotAvailableError(
                f"This stream was left after {batches} batches on each of {ranks} ranks; {self.ranks.size} ranks "
                f"cannot continue there, because {batches * before} samples, read by {workers} worker(s) in turn, do "
                f"not divide among them. {advice}"
            )
        return steps

    @staticmethod
    def _skip(source: Any, batches: int, first: list[Any] | None = None) -> int:
        """Read and leave out up to `batches` batches; the first goes to `first`. Says how many there were."""
        for done in range(batches):
            try:
                batch = next(source)
            except StopIteration:
                return done
            if first is not None and done == 0:
                first.append(batch)
        return batches


def _dump_ahead(run: Run, randomness: Randomness) -> dict[str, Any]:
    ahead: dict[str, Any] = {} if run.first_with is None else {"first_with": run.first_with}
    if run.looked_ahead is not None:
        raw, batches = run.looked_ahead
        ahead |= {"batches": batches, "with": randomness.tree(raw)}
    if run.first_batch is not None and _is_plain(run.first_batch):
        ahead["first"] = run.first_batch
    return ahead


def _is_plain(batch: Any) -> bool:
    """Whether a batch consists of tensors and plain data only."""
    if type(batch) is dict:
        return all(isinstance(key, str) and _is_plain(value) for key, value in batch.items())
    if type(batch) in (list, tuple):
        return all(_is_plain(item) for item in batch)
    return batch is None or type(batch) in (torch.Tensor, bool, int, float, str, bytes)
