"""The stand-in for TransformerEngine, and models for fp8."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.host import available, versions
from accel_train.precision.fp8 import te

FAKE_TE = str(Path(__file__).parent / "fake_te")
"""Folder with the package and its metadata, as an installed package has them."""


@contextmanager
def fake_transformer_engine() -> Iterator[Any]:
    """Make the stand-in importable inside the block, on the CPU; gives `transformer_engine.pytorch`."""
    devices = te.DEVICE_TYPES
    sys.path.insert(0, FAKE_TE)
    _forget_what_is_installed()
    te.DEVICE_TYPES = frozenset({"cpu"})
    try:
        import transformer_engine.pytorch as module

        yield module
    finally:
        te.DEVICE_TYPES = devices
        sys.path.remove(FAKE_TE)
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        _forget_what_is_installed()


def _forget_what_is_installed() -> None:
    available._found.cache_clear()
    versions.installed_version.cache_clear()
    importlib.invalidate_caches()


class Block(nn.Module):
    """A layer of 32 values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks whose sizes are multiples of 16, a layer of another size, and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.odd = nn.Linear(32, 20)
        self.head = nn.Linear(20, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.odd(x)).squeeze(-1)


CONVERTED = ["blocks.0.linear", "blocks.1.linear"]
"""Names of the layers of `Net` that torchao converts by default."""


def rows(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches for `Net`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 16, generator=generator), torch.randn(size, generator=generator))
        for _ in range(count)
    ]
