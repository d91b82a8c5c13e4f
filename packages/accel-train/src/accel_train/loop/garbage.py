"""Collecting garbage at chosen steps: Python's collector then stops no rank while the others wait for it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from accel_train.errors import OptionError
from accel_train.loop.observers import StepObserver

__all__ = ["GarbageCollector", "collect_garbage"]


class GarbageCollector(StepObserver):
    """Runs Python's garbage collector after every `every` optimizer steps.

    Args:
        every: how many steps; ranks take the same steps, so they collect at the same ones.
        generation: what `gc.collect` collects: 2 everything, 1 what is young.
    """

    def __init__(self, every: int, generation: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise OptionError(
                f"collect_garbage(every={every!r}): every must be a whole number of at least 1 optimizer step."
            )
        if generation not in (0, 1, 2):
            raise OptionError(
                f"collect_garbage(generation={generation!r}): generation must be 0, 1 or 2, as gc.collect takes it."
            )
        self.every = every
        self.generation = generation
        self.steps = 0
        self.collections = 0

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect, if it is time; a skipped step counts as well."""
        self.steps += 1
        if self.steps % self.every == 0:
            gc.collect(self.generation)
            self.collections += 1


@contextlib.contextmanager
def collect_garbage(observers: list[StepObserver], collector: GarbageCollector) -> Iterator[GarbageCollector]:
    """See `Accelerator.collect_garbage`; a collector of a context around this one pauses meanwhile."""
    outer, automatic = [item for item in observers if isinstance(item, GarbageCollector)], gc.isenabled()
    gc.collect()  # what the setup left behind
    gc.disable()
    observers[:] = [*(item for item in observers if item not in outer), collector]
    try:
        yield collector
    finally:
        observers.remove(collector)
        observers += outer
        if automatic:
            gc.enable()
