"""Samples and small objects that tests of loaders, of loops and of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

__all__ = ["Held", "Numbers", "inputs", "make"]


class Numbers(IterableDataset[int]):
    """The numbers below ``n``; counts those that are read.

    Args:
        n: how many there are.
        fail_at: a number that cannot be read.
    """

    def __init__(self, n: int, fail_at: int | None = None) -> None:
        self.n, self.fail_at, self.read = n, fail_at, 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            if index == self.fail_at:
                raise LookupError(f"sample {index} cannot be read")
            self.read += 1
            yield index


class Held:
    """A registered object whose state is whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """What it holds."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Hold it."""
        self.state = state


def make(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, torch.optim.SGD]:
    """A linear model of three features, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def inputs(rows: int = 12) -> Tensor:
    """Rows for that model, the same at each call."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
