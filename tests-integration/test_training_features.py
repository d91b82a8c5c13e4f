"""Compiled blocks and layers that are stored in a small dtype, in a prepared training with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from testkit import worlds


class Adapted(nn.Module):
    """A frozen layer and two trained matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 8) / 4)
        self.up = nn.Parameter(torch.randn(8, 2) / 4)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


class Model(nn.Module):
    """Repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Adapted() for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def inputs() -> Any:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_hand(stored: torch.dtype | None) -> list[torch.Tensor]:
    """The frozen weights are rounded once, as storing them does."""
    model = Model()
    if stored is not None:
        for block in model.blocks:
            for tensor in block.base.parameters():
                tensor.data = tensor.data.to(stored).float()
    optimizer = torch.optim.SGD(trained(model), lr=0.5, momentum=0.9)
    for _ in range(3):
        model(inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in trained(model)]


def ours(regional: bool, stored: torch.dtype | None, folder: str) -> Any:
    from accel_bigmodel import attach_layerwise_casting_hooks
    from accel_train import Accelerator, TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True) if regional else None
    accelerator = Accelerator(dynamo_plugin=plugin)
    model: Any = Model()
    if stored is not None:
        attach_layerwise_casting_hooks(model, stored, torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained(model), lr=0.5, momentum=0.9))
    mine = inputs().chunk(accelerator.num_processes)[accelerator.process_index]
    for step in range(3):
        accelerator.backward(model(mine).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            accelerator.save_state(folder)
        if step == 1:  # once more from there
            accelerator.load_state(folder)
            accelerator.backward(model(mine).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    compiled = [block._compiled_call_impl is not None for block in plain.blocks]
    return [parameter.detach() for parameter in trained(plain)], plain.blocks[0].base.weight.dtype, compiled


@pytest.mark.wide(only=["stored1-True-2", "stored2-True-2"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_adapters_train_as_in_plain_pytorch(tmp_path: Any, stored: Any, regional: bool, ranks: int) -> None:
    expected = by_hand(stored)
    for found, dtype, compiled in worlds.run(
        ours, ranks, regional, stored, str(tmp_path / "state"), timeout=180
    ):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert dtype == (stored or torch.float32)
        assert compiled == [regional] * 3
