"""Checkpoints in files of each FSDP rank, as Accelerate writes them with ``use_dcp=False``."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from testkit import worlds

__all__ = ["STEPS", "Net", "trained", "whole", "written"]

STEPS = 2


class Net(nn.Module):
    """Uneven rows, a weight of which only the first rank has a row, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        found: torch.Tensor = self.head(self.norm(self.body(x)))
        return found


def written(folder: Path, *mesh: int) -> dict[str, Any]:
    """Train `Net` on the ranks of a mesh, and save it.

    Returns:
        What `whole` returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = worlds.run(_write, math.prod(mesh), str(folder), mesh)[0]
    return found


def _write(folder: str, shape: tuple[int, ...]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    model, optimizer = trained(shape)
    own = StateDictOptions(full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
    rank = torch.distributed.get_rank()
    torch.save(get_model_state_dict(model, options=own), f"{folder}/pytorch_model_fsdp_0_rank{rank}.bin")
    state = get_optimizer_state_dict(model, optimizer, options=own)
    torch.save(state, f"{folder}/optimizer_0_rank{rank}.bin")
    return whole(model, optimizer)


def trained(shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train `Net` for `STEPS` steps under FSDP2 on the ranks of a mesh; on each of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    model = Net()
    for layer in (model.body, model.norm, model.head, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.arange(12.0).reshape(3, 4) / 10 + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole weights and the whole optimizer state by parameter name, as torch gathers them; on each rank."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
