"""Small models that tests of loading share, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Net(nn.Module):
    """A body with parameters and with buffers of two dtypes, and a head."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of three to rows of two."""
        out: torch.Tensor = self.head(self.body(x))
        return out


class Tied(nn.Module):
    """The weight of an embedding is that of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Untied(Tied):
    """The same names, and two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


class WithTable(nn.Module):
    """With a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A model without values, buffers included."""
    with torch.device("meta"):
        return build()


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models hold equal values under equal names."""
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
