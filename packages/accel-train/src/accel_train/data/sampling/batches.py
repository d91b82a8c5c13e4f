"""Batch samplers: one rank's share of another batch sampler, and skipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from accel_train.data.sampling.index_streams import (
    ArithmeticStream,
    IndexStream,
    RoundStream,
    SamplerReader,
    SingleIndexStream,
    SingleStream,
)
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import (
    Later,
    OrderSource,
    Record,
    is_torch_batch_sampler,
    order_source,
    share_generator,
)
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.shared_seed import Alone, Sharing
from accel_train.errors import DataError

__all__ = [
    "BatchSamplerShard",
    "Opening",
    "SamplerPlan",
    "ShardedBatchSampler",
    "SkipBatchSampler",
    "open_stream",
    "plan_of",
]


@dataclass(frozen=True, slots=True)
class Opening:
    """Options for the beginning of an epoch.

    Args:
        recorded: an earlier draw of the order, to be used again.
        position: where to continue, as `IndexStream.consumed` returned it; counted from the beginning of the epoch, so
            what is skipped anyway is part of it.
        reached: where an interrupted run was, in the same terms, whether or not to continue there.
        sharing: makes random draws equal on all ranks.
        in_flight: batches that workers may hold.
        skip: batches to skip.
        draws_alike: whether ranks that draw for themselves read the same samples.
        later: for draws that an interrupted run had not made.
        watch: wraps the iterator of a sampler that is read again by a run that continues.
    """

    recorded: Record | None = None
    position: dict[str, Any] | None = None
    reached: dict[str, Any] | None = None
    sharing: Sharing = Alone()  # noqa: RUF009 - stateless
    in_flight: int = 0
    skip: int = 0
    draws_alike: bool = False
    later: Later = nullcontext
    watch: Callable[[Iterator[Any]], Iterator[Any]] = iter


class ShardedBatchSampler(BatchSampler):
    """Shards a batch sampler: yields the batches of one rank.

    With torch's own samplers a batch is computed by arithmetic, at a cost that does not depend on the number
    of ranks. Any other batch sampler is iterated, on every rank alike.

    Args:
        batch_sampler: the batch sampler to shard.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: False: each rank takes one whole batch of a round. True: each rank takes a slice of
            every batch.
        even_batches: complete the last round with the first samples, so that all ranks have the same
            number of batches of the same size. May be changed between epochs.

    Raises:
        DataError: `split_batches` is set, and the batch size is missing or not a multiple of `num_processes`.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        # BatchSampler.__init__ would require a sampler; this class only shares its type.
        self.batch_sampler = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        if split_batches:
            check_split(self.batch_size, num_processes)
        # Under a user's batch sampler torch's random sampler draws its seed on every rank.
        self._drawing = _drawing_sampler(batch_sampler) if num_processes > 1 else None

    @property
    def total_length(self) -> int:
        """Number of batches of the shared batch sampler."""
        return len(self.batch_sampler)

    def layout(self, total: int, start: int = 0) -> BatchLayout:
        """The rounds of an epoch of `total` samples, from position `start`."""
        size = 1 if self.batch_size is None else self.batch_size
        each = size // self.num_processes if self.split_batches else size
        return BatchLayout(
            total=total,
            batch=each,
            ranks=self.num_processes,
            rank=self.process_index,
            start=start,
            drop_last=self.drop_last,
            even=self.even_batches,
        )

    def open(self, opening: Opening, plan: SamplerPlan | None = None) -> IndexStream:
        """Begin an epoch.

        Args:
            opening: how.
            plan: what `plan_of` finds in this sampler, if that was asked already.
        """
        if plan is None:
            plan = plan_of(self)
        position = opening.position or {}
        skip = opening.skip + plan.skip
        source = plan.source
        if source is not None:
            size = 1 if self.batch_size is None else self.batch_size
            start = _position(position, "samples")
            if skip or plan.skip_base:
                start = max(start, skip * self.layout(0).stride + plan.skip_base * size)
            kind = SingleIndexStream if self.batch_size is None else ArithmeticStream
            layout = self.layout(plan.samples, start)
            return kind(layout, source, opening.sharing, opening.recorded, opening.later)
        per_round = 1 if self.split_batches else self.num_processes
        record: Record = {}
        if (
            self.num_processes == 1
        ):  # so written after prepare(): the sampler takes its own part of the samples
            items = iter(self.batch_sampler)
        elif self._drawing is None:
            record = _share_sampler(self.batch_sampler, opening)
            items = iter(self.batch_sampler)
        else:
            items = _seeded_items(self.batch_sampler, self._drawing, opening, record)
        first = max(_position(position, "base_batches"), skip * per_round)
        return RoundStream(
            _reader(items, opening, first, 3 * self.num_processes),
            ranks=self.num_processes,
            rank=self.process_index,
            split=self.split_batches,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            even=self.even_batches,
            record=record,
            skip_base=first,
            in_flight=opening.in_flight,
            length=self._known_length,
        )

    def _known_length(self) -> int | None:
        if self.split_batches and not self.even_batches and not self.drop_last:
            return None  # the last batch may be too small to give every rank a part
        return length_of(self)

    def __iter__(self) -> Iterator[list[Any]]:
        return open_stream(self, Opening())

    def __len__(self) -> int:
        base = self.batch_sampler
        if is_torch_batch_sampler(base):
            return self.layout(len(base.sampler)).batches
        if order_source(base) is not None:
            return self.layout(len(base)).batches
        if self.split_batches:
            return len(base)
        rounds, left = divmod(len(base), self.num_processes)
        if left == 0 or self.drop_last:
            return rounds
        return rounds + (1 if self.even_batches or self.process_index < left else 0)


BatchSamplerShard = ShardedBatchSampler
"""The name that scripts written for Accelerate use."""


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first `skip_batches` batches of another one.

    Args:
        batch_sampler: any batch sampler.
        skip_batches: how many batches to skip at every iteration.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Number of batches of the wrapped batch sampler, the skipped ones included."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return open_stream(self, Opening())

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """The sampler that torch's loader iterates, analysed: a batch sampler, or a sampler of single indices.

    Args:
        sampler: below all that only skips.
        skip: batches of this rank that are skipped at every iteration.
        skip_base: batches of a shared sampler that are skipped before they are shared out.
        source: how to draw the order at once; None if the sampler must be iterated.
        samples: samples in an epoch, with `source`.
    """

    sampler: Any
    skip: int = 0
    skip_base: int = 0
    source: OrderSource | None = None
    samples: int = 0

    @property
    def unit(self) -> str:
        """The unit of its streams' positions."""
        at_once = self.source is not None and isinstance(self.sampler, BatchSampler)
        return "samples" if at_once else "base_batches"

    def open(self, opening: Opening) -> IndexStream:
        """Begin an epoch."""
        sampler, source = self.sampler, self.source
        if isinstance(sampler, ShardedBatchSampler):
            return sampler.open(opening, self)
        skip = opening.skip + self.skip
        position = opening.position or {}
        if source is not None and isinstance(sampler, BatchSampler):
            size = sampler.batch_size
            layout = BatchLayout(
                total=self.samples,
                batch=size,
                ranks=1,
                rank=0,
                start=max(_position(position, "samples"), skip * size),
                drop_last=sampler.drop_last,
                even=False,
            )
            return ArithmeticStream(layout, source, opening.sharing, opening.recorded, opening.later)
        first = max(_position(position, "base_batches"), skip)
        record: Record = {}
        seeded = opening.draws_alike or (opening.recorded is not None and "seed" in opening.recorded)
        drawing = _drawing_sampler(sampler) if seeded else None
        items = iter(sampler) if drawing is None else _seeded_items(sampler, drawing, opening, record)
        stream = SingleStream(
            _reader(items, opening, first, 3),
            skip=first,
            real_rows=padded_rows(sampler),
            in_flight=opening.in_flight,
            length=lambda: length_of(sampler),
        )
        stream.record = record
        return stream


def plan_of(sampler: Any) -> SamplerPlan:
    """Take apart what torch's loader iterates."""
    skip = skip_base = 0
    while isinstance(sampler, SkipBatchSampler):
        skip += sampler.skip_batches
        sampler = sampler.batch_sampler
    base = sampler
    if isinstance(sampler, ShardedBatchSampler):
        base = sampler.batch_sampler
        while isinstance(base, SkipBatchSampler):
            skip_base += base.skip_batches
            base = base.batch_sampler
    source = _source_of(base)
    return SamplerPlan(sampler, skip, skip_base, source, 0 if source is None else source.length())


def open_stream(sampler: Any, opening: Opening) -> IndexStream:
    """Begin an epoch of whatever torch's loader iterates: a batch sampler, or a sampler of single indices."""
    return plan_of(sampler).open(opening)


def length_of(sampler: Any) -> int | None:
    """The length of a sampler or dataset; None if it has none."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _source_of(sampler: Any) -> OrderSource | None:
    if is_torch_batch_sampler(sampler):
        return order_source(sampler.sampler)
    return None if isinstance(sampler, BatchSampler) else order_source(sampler)


def _drawing_sampler(sampler: Any) -> RandomSampler | None:
    """Torch's random sampler below a user's batch sampler, if it has no generator of its own."""
    if _source_of(sampler) is not None:
        return None
    while sampler is not None:
        if isinstance(sampler, RandomSampler):
            own = sampler.generator is not None or isinstance(sampler, SeedableRandomSampler)
            return None if own else sampler
        sampler = getattr(sampler, "sampler", None)
    return None


def _seeded_items(sampler: Any, drawing: RandomSampler, opening: Opening, record: Record) -> Iterator[Any]:
    """The items of `sampler`, drawn alike on all ranks; `record` gets what they were drawn from.

    The seed is drawn with the first item, when torch's sampler would draw it, and is used as torch's sampler uses it.
    """
    seed = (opening.recorded or {}).get("seed")
    if seed is None:
        seed = opening.sharing.integer(int(torch.empty((), dtype=torch.int64).random_().item()))
    record["seed"] = seed
    drawing.generator = torch.Generator().manual_seed(seed)
    try:
        yield from sampler
    finally:
        drawing.generator = None


def _share_sampler(sampler: Any, opening: Opening) -> Record:
    """Give an iterated sampler's own generator the same state on all ranks; returns that state."""
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return share_generator(generator, opening.sharing, opening.recorded)
        sampler = getattr(sampler, "sampler", None)
    return {}


def _reader(items: Iterator[Any], opening: Opening, first: int, keep: int) -> SamplerReader:
    """A user's sampler, read from its beginning; `first` is the first item that will be returned."""
    reached = opening.reached or {}
    here = reached.get("base_batches") == first
    return SamplerReader(
        opening.watch(items),
        position=first,
        ahead=reached.get("ahead", []) if here else [],
        pulled=reached.get("pulled") if here else None,
        ended=here and bool(reached.get("ended", False)),
        keep=keep * (opening.in_flight + 3),
        later=opening.later,
    )


def _position(position: dict[str, Any], unit: str) -> int:
    if not position:
        return 0
    if unit not in position:
        raise DataError(
            f"The saved position counts {', '.join(sorted(position))}, but this loader's sampler counts "
            f"{unit}: it is not the kind of sampler that the state was saved with. Prepare the same "
            "loader, or do not load its state."
        )
    return int(position[unit])


def padded_rows(sampler: Any) -> Callable[[int], tuple[int, ...] | None] | None:
    """The real rows of each batch over torch's `DistributedSampler`, if it pads; None for other samplers."""
    base = getattr(sampler, "sampler", None)
    if not isinstance(base, DistributedSampler) or not is_torch_batch_sampler(sampler) or base.drop_last:
        return None
    total, ranks, size = len(base.dataset), base.num_replicas, sampler.batch_size  # type: ignore[arg-type]
    if total % ranks == 0:
        return None
    real = [(total - rank + ranks - 1) // ranks for rank in range(ranks)]

    def valid(batch_index: int) -> tuple[int, ...] | None:
        done = batch_index * size
        rows = min(size, base.num_samples - done)
        counts = tuple(min(max(count - done, 0), rows) for count in real)
        return None if min(counts) == rows else counts

    return valid


def check_split(batch_size: object, num_processes: int) -> None:
    """Refuse to split batches whose size is not a multiple of the number of ranks."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise DataError(
            f"split_batches=True needs a batch size that is a whole number, got {batch_size!r}. Give the "
            "batch sampler a `batch_size` attribute, or use split_batches=False."
        )
    if batch_size % num_processes:
        fitting = -(-batch_size // num_processes) * num_processes
        raise DataError(
            f"split_batches=True cuts each batch into {num_processes} equal parts, but the batch size is "
            f"{batch_size}. Use a round multiple of {num_processes} (say {fitting}), or split_batches=False."
        )
