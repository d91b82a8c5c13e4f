"""The order of an epoch, drawn exactly as torch's own samplers draw it.

torch's samplers are Python generators that yield one index at a time. For the samplers that torch
ships, the same order can be had as a tensor, with the same draws from the same generators in the same
sequence, so that any rank's batch is a slice of it. ``order_source`` answers None for every other sampler,
which is then iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.shared_seed import Sharing

__all__ = ["Later", "Order", "OrderSource", "Record", "order_source"]

Later = Callable[[], AbstractContextManager[None]]
"""Makes a context for draws that an interrupted run had not made; see `Randomness.as_afterwards`."""

Record = dict[str, Any]
"""What was drawn for an epoch: ``{"seed": int}``, ``{"generator": uint8 tensor}`` or nothing; and how far, as
``{"drawn": samples, "exhausted": bool}``."""

# RandomSampler draws with replacement in blocks of this size (torch/utils/data/sampler.py).
_REPLACEMENT_CHUNK = 32


class Order(Protocol):
    """The samples of one epoch, by position."""

    block: int
    """How many rounds may be cut at once without drawing earlier than torch would."""

    def rows(self, start: int, rounds: int, stride: int, low: int, high: int) -> list[list[int]]:
        """The samples at ``[low, high)`` of each of `rounds` windows of `stride` positions."""

    def take(self, start: int, stop: int) -> list[int]:
        """The samples at positions ``[start, stop)``."""

    def exhaust(self) -> None:
        """Make the draws that torch makes when its iterator is asked for more than there is."""

    def finished(self) -> None:
        """The epoch was consumed to its end."""

    def progress(self) -> Record:
        """How far was drawn, for `catch_up`."""

    def catch_up(self, drawn: int, exhausted: bool, later: Later) -> None:
        """Draw as far as an interrupted run had drawn; all that follows is drawn in the context that `later` makes."""


class OrderSource(Protocol):
    """A sampler whose order can be drawn at once."""

    def length(self) -> int:
        """Samples in an epoch."""

    def draw(self, sharing: Sharing, recorded: Record | None) -> tuple[Order, Record]:
        """Draw the order of an epoch, or draw again the one that was `recorded`.

        Collective when `sharing` is; every rank makes the same number of draws from its own generators.
        """


# Orders


class _Range:
    block = 64

    def rows(self, start: int, rounds: int, stride: int, low: int, high: int) -> list[list[int]]:
        stop = start + rounds * stride
        return [list(range(base + low, base + high)) for base in range(start, stop, stride)]

    def take(self, start: int, stop: int) -> list[int]:
        return list(range(start, stop))

    def exhaust(self) -> None: ...

    def finished(self) -> None: ...

    def progress(self) -> Record:
        return {}

    def catch_up(self, drawn: int, exhausted: bool, later: Later) -> None: ...


class _Drawn:
    """An order drawn in chunks, none earlier than torch would draw it.

    Args:
        length: samples in the epoch.
        chunk: ``chunk(drawn, wanted)`` draws the next samples, at least up to `wanted` where one call can.
        trailing: draws made when the iterator runs out.
        indices: what the drawn numbers point into, or None when they are the samples themselves.
        on_finish: called when the epoch was consumed.
        block: as in `Order`.
    """

    def __init__(
        self,
        length: int,
        chunk: Callable[[int, int], Tensor],
        *,
        trailing: Callable[[], object] | None = None,
        indices: Sequence[int] | None = None,
        on_finish: Callable[[], object] | None = None,
        block: int = 64,
    ) -> None:
        self._length = length
        self._chunk = chunk
        self._trailing = trailing
        self._indices = indices
        self._on_finish = on_finish
        self._drawn = 0
        self._exhausted = False
        self._samples: Tensor | None = None
        self._later: Later = nullcontext
        self.block = block

    def _until(self, stop: int) -> Tensor:
        while self._drawn < stop:
            with self._later():
                chunk = self._chunk(self._drawn, stop)[: self._length - self._drawn]
            if chunk.numel() == self._length:
                self._samples = chunk
            else:
                if self._samples is None:
                    self._samples = torch.empty(self._length, dtype=torch.int64)
                self._samples[self._drawn : self._drawn + chunk.numel()] = chunk
            self._drawn += chunk.numel()
        if self._samples is None:
            self._samples = torch.empty(0, dtype=torch.int64)
        return self._samples

    def rows(self, start: int, rounds: int, stride: int, low: int, high: int) -> list[list[int]]:
        stop = start + rounds * stride
        window = self._until(stop)[start:stop].view(rounds, stride)[:, low:high]
        drawn: list[list[int]] = window.tolist()
        indices = self._indices
        if indices is None:
            return drawn
        return [[indices[i] for i in batch] for batch in drawn]

    def take(self, start: int, stop: int) -> list[int]:
        drawn: list[int] = self._until(stop)[start:stop].tolist()
        indices = self._indices
        return drawn if indices is None else [indices[i] for i in drawn]

    def exhaust(self) -> None:
        self._until(self._length)
        self._exhausted = True
        if self._trailing is not None:
            with self._later():
                self._trailing()
            self._trailing = None

    def progress(self) -> Record:
        return {"drawn": self._drawn, "exhausted": self._exhausted}

    def catch_up(self, drawn: int, exhausted: bool, later: Later) -> None:
        if drawn:
            self._until(min(drawn, self._length))
        if exhausted:
            self.exhaust()
        self._later = later

    def finished(self) -> None:
        if self._on_finish is not None:
            self._on_finish()
            self._on_finish = None


# Sources


class _Sequential:
    def __init__(self, sampler: SequentialSampler) -> None:
        self._sampler = sampler

    def length(self) -> int:
        return len(self._sampler)

    def draw(self, sharing: Sharing, recorded: Record | None) -> tuple[Order, Record]:
        return _Range(), {}


class _Random:
    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler

    def length(self) -> int:
        return len(self._sampler)

    def draw(self, sharing: Sharing, recorded: Record | None) -> tuple[Order, Record]:
        theirs = self._sampler.generator
        if theirs is not None:
            record = share_generator(theirs, sharing, recorded)
            # The user's generator may have other users: no draw may happen earlier than it would in torch.
            return self._order(theirs, block=1), record
        seed = _recorded_seed(recorded)
        if seed is None:
            seed = sharing.integer(int(torch.empty((), dtype=torch.int64).random_().item()))
        return self._order(torch.Generator().manual_seed(seed)), {"seed": seed}

    def _order(
        self, generator: torch.Generator, *, block: int = 64, on_finish: Callable[[], object] | None = None
    ) -> Order:
        size, length = len(self._sampler.data_source), self.length()
        if not self._sampler.replacement:
            return _Drawn(
                length,
                lambda drawn, wanted: torch.randperm(size, generator=generator),
                # torch always draws one permutation more for the remainder, even an empty one.
                trailing=(lambda: torch.randperm(size, generator=generator)) if length % size == 0 else None,
                on_finish=on_finish,
                block=block,
            )

        def with_replacement(drawn: int, wanted: int) -> Tensor:
            whole = length // _REPLACEMENT_CHUNK * _REPLACEMENT_CHUNK
            if drawn >= whole:
                count = length - whole
            else:
                chunks = -(-(min(wanted, whole) - drawn) // _REPLACEMENT_CHUNK)
                count = chunks * _REPLACEMENT_CHUNK
            return torch.randint(high=size, size=(count,), dtype=torch.int64, generator=generator)

        return _Drawn(length, with_replacement, on_finish=on_finish, block=block)


class _Seedable(_Random):
    def __init__(self, sampler: SeedableRandomSampler) -> None:
        super().__init__(sampler)
        self._seedable = sampler

    def draw(self, sharing: Sharing, recorded: Record | None) -> tuple[Order, Record]:
        sampler = self._seedable
        seed = _recorded_seed(recorded)
        if seed is None:
            seed = sharing.integer(sampler.seed)
        else:
            sampler.initial_seed = seed - sampler.epoch
        if sampler.generator is None:
            sampler.generator = torch.Generator()
        sampler.generator.manual_seed(seed)
        epoch = sampler.epoch
        order = self._order(sampler.generator, on_finish=lambda: sampler.set_epoch(epoch + 1))
        return order, {"seed": seed}


class _Direct:
    """Samplers that draw once per epoch straight from their generator, or from torch's own."""

    def __init__(
        self,
        sampler: SubsetRandomSampler | WeightedRandomSampler,
        draw: Callable[[torch.Generator | None], Tensor],
        indices: Sequence[int] | None,
    ) -> None:
        self._sampler = sampler
        self._draw = draw
        self._indices = indices

    def length(self) -> int:
        return len(self._sampler)

    def draw(self, sharing: Sharing, recorded: Record | None) -> tuple[Order, Record]:
        theirs = self._sampler.generator
        if theirs is not None:
            record = share_generator(theirs, sharing, recorded)
            samples = self._draw(theirs)
        elif recorded is not None and "generator" in recorded:
            record = recorded
            samples = self._draw(_generator_at(recorded["generator"]))
        else:
            before = torch.get_rng_state()
            samples = self._draw(None)
            shared = sharing.state(before)
            if not torch.equal(shared, before):
                samples = self._draw(_generator_at(shared))
            record = {"generator": shared}
        return _Drawn(len(samples), lambda drawn, wanted: samples, indices=self._indices), record


def _subset(sampler: SubsetRandomSampler) -> OrderSource:
    size = len(sampler.indices)
    return _Direct(sampler, lambda generator: torch.randperm(size, generator=generator), sampler.indices)


def _weighted(sampler: WeightedRandomSampler) -> OrderSource:
    def draw(generator: torch.Generator | None) -> Tensor:
        return torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=generator
        )

    return _Direct(sampler, draw, None)


def _recorded_seed(recorded: Record | None) -> int | None:
    if recorded is None:
        return None
    seed = recorded.get("seed")
    return None if seed is None else int(seed)


def _generator_at(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def share_generator(generator: torch.Generator, sharing: Sharing, recorded: Record | None) -> Record:
    """Set a user's generator to rank 0's state, or to the recorded one; returns what it was set to."""
    if recorded is not None and "generator" in recorded:
        state = recorded["generator"]
        generator.set_state(state)
        return {"generator": state}
    state = generator.get_state()
    shared = sharing.state(state)
    if not sharing.alone:
        generator.set_state(shared)
    return {"generator": shared}


_SOURCES: dict[type[Sampler[Any]], Callable[[Any], OrderSource]] = {
    SequentialSampler: _Sequential,
    RandomSampler: _Random,
    SeedableRandomSampler: _Seedable,
    SubsetRandomSampler: _subset,
    WeightedRandomSampler: _weighted,
}


def order_source(sampler: object) -> OrderSource | None:
    """Find the source that draws `sampler`'s order at once; None if the sampler must be iterated.

    A subclass counts as its base only when it changes neither iteration nor length.
    """
    for base, source in _SOURCES.items():
        if type(sampler) is base or (isinstance(sampler, base) and _inherits(type(sampler), base)):
            return source(sampler)
    return None


def _inherits(kind: type, base: type) -> bool:
    return kind.__iter__ is base.__iter__ and kind.__len__ is base.__len__  # type: ignore[attr-defined]


def is_torch_batch_sampler(batch_sampler: object) -> bool:
    """Whether `batch_sampler` groups its sampler's indices as `torch.utils.data.BatchSampler` does."""
    return isinstance(batch_sampler, BatchSampler) and _inherits(type(batch_sampler), BatchSampler)
