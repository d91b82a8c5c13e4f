"""Beginning an iteration with the draws of an interrupted one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from accel_train.data.epoch import Restored

__all__ = ["as_begun", "generator_state", "primed"]


def primed(source: Any) -> Iterator[Any]:
    """Let a stream read its first item now: it may draw its order no earlier than that."""
    return itertools.chain(list(itertools.islice(source, 1)), source)


@contextlib.contextmanager
def as_begun(restored: Restored | None, generator: torch.Generator | None) -> Iterator[None]:
    """Let an iterator be created with the interrupted run's draws, and torch's own generator be as it was."""
    if restored is None or restored.begun_with is None:
        yield
    elif generator is not None:
        generator.set_state(restored.begun_with)
        yield
    else:
        now = torch.get_rng_state()
        torch.set_rng_state(restored.begun_with)
        try:
            yield
        finally:
            torch.set_rng_state(now)


def generator_state(generator: torch.Generator | None) -> Tensor:
    """The state of a loader's generator, which is torch's own when it has none."""
    return torch.get_rng_state() if generator is None else generator.get_state()
