"""fp8 by a stand-in for TransformerEngine on several ranks: weights train, and a checkpoint continues exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds
from testkit.fp8 import Net, fake_transformer_engine, rows


def train(
    strategy: str, folder: str, begin: int, end: int
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Steps `begin` to `end`; from a saved state unless it begins at 0, and saves one in the middle."""
    from accel_train import Accelerator, TERecipeKwargs

    with fake_transformer_engine() as engine:
        chosen: Any = None if strategy == "ddp" else strategy
        accelerator = Accelerator(
            mixed_precision="fp8", cpu=True, strategy=chosen, kwargs_handlers=[TERecipeKwargs()]
        )
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        if begin:
            accelerator.load_state(folder)
        losses = []
        for number, (x, y) in enumerate(rows(end)[begin:], begin):
            x, y = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in (x, y))
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if not begin and number == 2:
                accelerator.save_state(folder)
        plain = accelerator.unwrap_model(model)
        kinds = [name for name, module in plain.named_modules() if isinstance(module, engine.Linear)]
        weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        return losses, weights, kinds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_layers_of_transformer_engine_train_and_continue(strategy, tmp_path):
    whole = worlds.run(train, 2, strategy, str(tmp_path / "state"), 0, 6)
    after = worlds.run(train, 2, strategy, str(tmp_path / "state"), 3, 6)
    start = Net().state_dict()
    assert whole[0][0] != whole[1][0], "ranks read different samples"
    for (losses, weights, kinds), (later, end, _) in zip(whole, after, strict=True):
        assert kinds == ["first", "blocks.0.linear", "blocks.1.linear"]
        assert list(weights) == list(start)
        assert all(not torch.equal(value, start[name]) for name, value in weights.items()), "all are trained"
        assert losses[3:] == later
        assert all(torch.equal(end[name], value) for name, value in weights.items())
