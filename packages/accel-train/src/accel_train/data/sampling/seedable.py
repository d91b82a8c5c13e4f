"""A random sampler whose order depends on a seed and the epoch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler

__all__ = ["SeedableRandomSampler"]


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` that seeds its generator with ``initial_seed + epoch`` at the start of each epoch.

    Args:
        *args: as for `torch.utils.data.RandomSampler`.
        data_seed: the initial seed; by default `torch.initial_seed()` at construction.
        **kwargs: as for `torch.utils.data.RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @property
    def seed(self) -> int:
        """The seed of the generator in this epoch; 64 bits, like `torch.initial_seed()` after `torch.seed()`."""
        return int(self.initial_seed + self.epoch) % 2**64

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
