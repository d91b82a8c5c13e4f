"""Collecting garbage at chosen steps: Python's collector then stops no rank while the others wait for it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Protocol

from accel_train.errors import OptionError

__all__ = ["GarbageCollector", "collect_garbage"]


class GarbageCollector:
    """Collects after every so many optimizer steps.

    Args:
        every: how many steps; ranks take the same steps, so they collect at the same ones.
        generation: what `gc.collect` collects: 2 everything, 1 what is young.
    """

    def __init__(self, every: int, generation: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise OptionError(
                f"collect_garbage(every={every!r}) is a whole number of optimizer steps, at least 1."
            )
        if generation not in (0, 1, 2):
            raise OptionError(
                f"collect_garbage(generation={generation!r}) is 0, 1 or 2, as gc.collect takes it."
            )
        self.every = every
        self.generation = generation
        self.steps = 0
        self.collections = 0

    def stepped(self) -> None:
        """A prepared optimizer has stepped, or skipped its step."""
        self.steps += 1
        if self.steps % self.every == 0:
            gc.collect(self.generation)
            self.collections += 1


class _Loop(Protocol):
    collector: GarbageCollector | None


@contextlib.contextmanager
def collect_garbage(loop: _Loop, collector: GarbageCollector) -> Iterator[GarbageCollector]:
    """See `Accelerator.collect_garbage`."""
    before, automatic = loop.collector, gc.isenabled()
    gc.collect()  # what the setup left behind
    gc.disable()
    loop.collector = collector
    try:
        yield collector
    finally:
        loop.collector = before
        if automatic:
            gc.enable()
