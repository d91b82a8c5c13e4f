"""Beginning an epoch: one function builds the iteration, with all that it reads from.

An interrupted epoch is begun again as of its beginning: all generators that reading can draw from get their states of
that moment, the order is drawn, the batches that were yielded are skipped, and the generators are put back. So resuming
needs no code path of its own, and draws of user code are repeated, not modelled.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_state.enums import RNGType
from accel_state.messages import warn
from accel_state.seeding import synchronize_rng_states
from accel_train.data.iterable import IterableDatasetShard, TaggingCollate
from accel_train.data.iteration import Iteration
from accel_train.data.loader import Indexes, PreparedLoader
from accel_train.data.position_checks import batches_of_stream, check_fits, refuse_short
from accel_train.data.reading_random_states import (
    ReadingSource,
    begin_own_reading,
    begin_shared_reading,
    may_draw,
    read_with,
)
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.batches import Opening, SamplerPlan, plan_of
from accel_train.data.sampling.index_streams import ArithmeticStream
from accel_train.data.saved_position import Restored
from accel_train.data.stateful import is_position, read_with_positions
from accel_train.data.torch_iterator import torch_iterator
from accel_train.data.workers import (
    RecordRngState,
    RestoreWorkerRng,
    ShowDataset,
    WithoutNotes,
    WorkerStates,
    dataset_with_epoch,
    end_workers_with,
)

__all__ = [
    "begin_epoch",
    "make_source",
    "open_own_part",
    "open_with_workers",
    "skip_batches",
    "source_to_load",
]

_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def begin_epoch(loader: PreparedLoader) -> Iteration:
    """Begin an iteration over a prepared loader. Collective if the loader synchronizes generators or shares draws.

    Raises:
        DataError: a loaded state of this epoch is of another kind of loader.
        NotAvailableError: this loader cannot continue where that was saved.
    """
    epoch = loader.epoch_state
    restored = epoch.begin(loader.left_out, loader.ledger.epochs)
    resume = restored if loader.use_stateful_dataloader else None
    if resume is not None:
        check_fits(loader, resume)
    began_before = restored is not None and restored.ranks == loader.ranks.size  # and made them equal then
    if loader.rng_types and not began_before and not loader.sharing.alone:
        synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
    if loader.followers:
        loader.tell_epoch(epoch.iteration)
    samplers = loader.stateful_samplers
    plan = None if loader.indexes is None else plan_of(loader.indexes.sampler)
    if restored is not None and resume is None:
        _warn_of_repeated(loader, restored, loader.left_out or (0 if plan is None else plan.skip))
    randomness = Randomness(loader.own_generators, plan is None or plan.source is None)
    start = None if restored is None else restored.rng_at_start
    with _AS_IT_IS if start is None else randomness.as_of(start):
        for sampler, saved in zip(samplers, (start or {}).get("samplers", ()), strict=False):
            sampler.load_state_dict(saved)
        rng = randomness.tree(randomness.now())
        rng["samplers"] = [sampler.state_dict() for sampler in samplers] if samplers else []
        running = loader.persistent_workers and loader.keeps_workers
        # Torch draws a base seed when it starts workers; where they ran already, the interrupted run drew none.
        ran = loader.workers_ran if start is None else start.get("workers_run", False)
        rng["workers_run"] = running or ran
        loader.seedless, loader.workers_ran = ran and not running, False
        iteration = loader.make_iteration(randomness, rng)
        iteration.epoch = epoch.iteration
        loader.current = epoch.running = iteration
        epoch.chosen = False
        loader.open_source(iteration, plan, restored)
    iteration.restored = restored
    return iteration


def _warn_of_repeated(loader: PreparedLoader, restored: Restored, skipped: int) -> None:
    """Say that batches before the saved position are read again, where the script does not skip any."""
    if restored.batches_yielded and not skipped and loader.ranks.index == 0:
        warn(
            f"The loaded state was saved after {restored.batches_yielded} batches of this epoch, but this loop begins "
            "with the first batch, so these batches are trained on again. To continue after them, pass the Accelerator "
            "DataLoaderConfiguration(use_stateful_dataloader=True), or iterate "
            f"accelerator.skip_first_batches(loader, {restored.batches_yielded}). The loop may also skip them itself.",
        )


def open_own_part(
    loader: PreparedLoader, iteration: Iteration, plan: SamplerPlan | None, restored: Restored | None
) -> None:
    """Open what a rank reads that reads for itself."""
    if loader.ranks.repeats:
        iteration.reading = iteration.states = begin_shared_reading(
            iteration.randomness, loader.generator, loader.sharing, loader.ranks
        )
    if loader.indexes is None or plan is None:
        there = _open_stream(loader, iteration, restored)
    else:
        there = _open_indexes(loader, loader.indexes, plan, iteration, restored)
    reading = iteration.reading
    if reading is not None:
        assert iteration.source is not None
        iteration.source = ReadingSource(iteration.source, reading)
    saved = None if restored is None or not there or not restored.is_of(loader.ranks) else restored.reading
    if iteration.states is not None and saved is not None:
        iteration.states.load(saved)


def _open_indexes(
    loader: PreparedLoader,
    indexes: Indexes,
    plan: SamplerPlan,
    iteration: Iteration,
    restored: Restored | None,
) -> bool:
    """Open a map-style dataset; whether the iteration begins at the saved position."""
    resume = restored if loader.use_stateful_dataloader else None
    in_flight = loader.num_workers * (loader.prefetch_factor or 0)
    opening = Opening(
        recorded=None if restored is None else restored.draw,
        position=None if resume is None else resume.position,
        reached=None if restored is None else restored.position,
        sharing=loader.sharing,
        in_flight=in_flight,
        skip=loader.skip_batches,
        draws_alike=loader.ranks.size == 1 and loader.ranks.repeats,
        later=iteration.randomness.as_afterwards,
        watch=iteration.watch,
    )
    reading = iteration.reading
    with reading or _AS_IT_IS:
        stream = plan.open(opening)
    if reading is not None and isinstance(stream, ArithmeticStream):
        stream.begin()  # the order's seed comes from where it comes from on one process
    there = resume is not None or (
        restored is not None and restored.batches_yielded == plan.skip + loader.skip_batches
    )
    iteration.stream = indexes.stream = stream
    try:
        with reading or _AS_IT_IS:
            iteration.source = open_with_workers(
                loader, iteration, restored if there else None, source_to_load(loader, resume)
            )
    finally:
        indexes.stream = None
    if restored is not None and restored.batches_yielded:
        with reading or _AS_IT_IS:
            stream.prime()
        if there and stream.passed is not None:
            wanted, each = restored.position.get("base_batches", 0), loader.sampler_batches_per_step
            refuse_short(restored, wanted, stream.passed, max(each, restored.ranks))
    return there


def _open_stream(loader: PreparedLoader, iteration: Iteration, restored: Restored | None) -> bool:
    """Open an iterable dataset; whether the iteration begins at the saved position."""
    resume = restored if loader.use_stateful_dataloader else None
    batches = loader.skip_batches
    if resume is not None and resume.batches_yielded:
        batches = max(batches_of_stream(loader, resume), batches)
    state = source_to_load(loader, resume)
    iteration.notes_rng = loader.num_workers == 0
    iteration.stride = loader.stream_stride
    with iteration.reading or _AS_IT_IS:
        source = make_source(loader, iteration, state)
        iteration.skipped = batches if state is not None else skip_batches(source, batches)
        if resume is not None or (restored is not None and restored.batches_yielded == batches):
            refuse_short(restored, batches, iteration.skipped)
        if restored is not None and restored.batches_yielded:
            if not iteration.skipped:
                # A stream may draw its order no earlier than it is read, so one item is read now and kept.
                source = itertools.chain(list(itertools.islice(source, 1)), source)
            elif (
                "rng" in restored.ahead
                and restored.is_of(loader.ranks)
                and iteration.skipped == restored.batches_yielded
            ):
                with iteration.randomness.as_of(restored.ahead["rng"]):
                    source = itertools.chain(
                        list(itertools.islice(source, min(restored.ahead["batches"], 1))), source
                    )
    iteration.source = source if loader.num_workers or loader.asks_dataset else iteration.watch(source)
    return restored is not None and iteration.skipped == restored.batches_yielded


def source_to_load(loader: PreparedLoader, resume: Restored | None) -> dict[str, Any] | None:
    """The saved position of a dataset that keeps its own; None if the dataset has to be read up to there."""
    if resume is None or not loader.asks_dataset or not resume.is_of(loader.ranks):
        return None
    return resume.source if is_position(resume.source) else None


def open_with_workers(
    loader: PreparedLoader, iteration: Iteration, restored: Restored | None, state: dict[str, Any] | None
) -> Iterator[Any]:
    """An iterator over a map-style dataset, whose workers report their generators and continue with saved ones."""
    count = loader.num_workers
    if not count or loader.asks_dataset or loader.persistent_workers:
        return make_source(loader, iteration, state)
    saved = None if restored is None or not restored.is_of(loader.ranks) else restored.workers
    if saved is not None and saved["count"] != count:
        if saved["states"]:
            warn(
                f"The state was saved with {saved['count']} workers, this loader has {count}: the random numbers that "
                "the dataset draws in workers do not continue but start from new seeds.",
            )
        saved = None
    turn, states = (0, {}) if saved is None else (saved["turn"], saved["states"])
    iteration.workers = WorkerStates(count, 2 * iteration.per_batch + 2, turn, states)
    replaced: dict[str, Any] = {"collate_fn": RecordRngState(loader.collate_fn)}
    if saved is not None:
        replaced["worker_init_fn"] = RestoreWorkerRng(turn, count, states, loader.worker_init_fn)
    return WithoutNotes(make_source(loader, iteration, state, replaced), iteration.workers.record)


def make_source(
    loader: PreparedLoader,
    iteration: Iteration,
    state: dict[str, Any] | None,
    replaced: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Torch's iterator over a loader's dataset.

    Args:
        loader: the loader.
        iteration: what the iterator is for.
        state: the position of a dataset that keeps its own, where to begin.
        replaced: functions in the place of the loader's own.
    """
    replaced = dict(replaced or {})
    seedless, loader.seedless = loader.seedless, False
    if loader.tagged:
        assert isinstance(loader.dataset, IterableDatasetShard)
        replaced["collate_fn"] = TaggingCollate(loader.dataset, loader.collate_fn)
    if iteration.reading is not None:
        replaced["generator"] = iteration.reading.worker_generator
    elif loader.ranks.size > 1 and _draws_for_itself(loader):
        states = begin_own_reading(torch.Generator() if seedless else loader.generator, loader.ranks)
        replaced["generator"] = states.worker_generator
        if not loader.num_workers and may_draw(loader.dataset, loader.collate_fn):
            iteration.states = states
    elif seedless:
        replaced["generator"] = torch.Generator()
    if loader.num_workers and loader.persistent_workers and hasattr(loader.dataset, "set_epoch"):
        # Workers stay over several epochs, with a dataset that hears of each; a new worker gets it as it is.
        if loader.worker_epoch is None:
            loader.worker_epoch = torch.tensor(iteration.epoch).share_memory_()  # type: ignore[no-untyped-call]
        replaced["dataset"] = dataset_with_epoch(loader.dataset, loader.worker_epoch)
        replaced["worker_init_fn"] = ShowDataset(replaced.get("worker_init_fn", loader.worker_init_fn))
    iterator: Iterator[Any]
    drawn = iteration.states if iteration.reading is None else None  # else they are set around all of it
    if loader.asks_dataset:
        iterator, positions = read_with_positions(loader, state, loader.workers_turned, drawn, replaced)
        iteration.source_state = positions.now
        loader.workers_turned = state is not None and bool(state["turn"])
    else:
        iterator = torch_iterator(loader, replaced) if replaced else DataLoader.__iter__(loader)
        if drawn is not None:
            read_with(drawn, iterator)
    if loader.persistent_workers:
        loader.ending = end_workers_with(loader, loader._iterator, loader.ending)
    return iterator


def _draws_for_itself(loader: PreparedLoader) -> bool:
    """Whether this rank draws other random numbers while it reads than the ranks that read other samples.

    A stream is left alone: each rank may read all of it, or divide an order that it draws from equal generators.
    Workers that stay continue with their generators, and torch draws nothing.
    """
    alike = any(kind == RNGType.TORCH for kind in loader.rng_types or ())
    stays = loader.persistent_workers and loader.keeps_workers
    return loader.reads_own_part and loader.indexes is not None and not alike and not stays


def skip_batches(source: Iterator[Any], batches: int, first: list[Any] | None = None) -> int:
    """Read and drop up to `batches` batches; the first goes to `first`. Returns how many there were."""
    for done in range(batches):
        try:
            batch = next(source)
        except StopIteration:
            return done
        if first is not None and done == 0:
            first.append(batch)
    return batches
