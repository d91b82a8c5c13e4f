"""What each of four ranks holds of parameters, gradients and optimizer state, under each way to divide a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from testkit import worlds

RANKS = 4
WIDTH = 8
STRATEGIES = {
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "tensor parallelism": "tensor_parallel",
    "pipeline parallelism": "pipeline",
}


class Layers(nn.Module):
    """Four layers that are one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def record() -> dict[str, Any]:
    """By strategy, for each rank: the boxes of every weight that it holds, as rows and columns."""
    return {
        "shape": [WIDTH, WIDTH],
        "layers": 4,
        "ranks": RANKS,
        "held": {
            title: worlds.run(globals()[function], RANKS, timeout=120)
            for title, function in STRATEGIES.items()
        },
    }


def ddp() -> dict[str, Any]:
    """Replicas."""
    from accel_train import Accelerator

    return _trained(Accelerator(cpu=True), Layers())


def fsdp2() -> dict[str, Any]:
    """Each layer is a unit, and gathered while it computes."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    return _trained(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()), Layers())


def tensor_parallel() -> dict[str, Any]:
    """Layers are divided by rows and by columns in turn, as the two of a transformer's block are."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accel_train import Accelerator, TorchTensorParallelPlugin

    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=RANKS))
    torch.manual_seed(0)
    model = Layers()
    styles = {f"layers.{at}": (ColwiseParallel, RowwiseParallel)[at % 2]() for at in range(4)}
    parallelize_module(model, accelerator.torch_device_mesh["tp"], styles)
    return _trained(accelerator, model)


def pipeline() -> dict[str, Any]:
    """One layer a rank, by ``torch.distributed.pipelining``."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from accel_state import PartialState

    state = PartialState(cpu=True)
    rank = state.process_index
    name = f"layers.{rank}.weight"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda got, wanted: (got - wanted).square().mean()
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = [torch.ones(4, WIDTH)] if rank == 0 else []
    schedule.step(*inputs, **({"target": torch.zeros(4, WIDTH)} if rank == RANKS - 1 else {}))
    optimizer.step()
    return _held({name: model[0].weight}, optimizer)


def _trained(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    computing: list[list[int]] = []
    layer = accelerator.unwrap_model(model).layers[0]
    layer.register_forward_pre_hook(lambda module, _: computing.append(_local_shape(module.weight)))
    accelerator.backward(model(torch.ones(4, WIDTH)).square().mean())
    optimizer.step()
    return _held(dict(accelerator.unwrap_model(model).named_parameters()), optimizer) | {
        "first layer in its forward": computing[0]
    }


def _local_shape(weight: torch.Tensor) -> list[int]:
    return list(weight.to_local().shape if hasattr(weight, "to_local") else weight.shape)


def _held(parameters: dict[str, torch.Tensor], optimizer: Any) -> dict[str, Any]:
    kept = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return {
        "parameters": {name: _boxes(parameter) for name, parameter in parameters.items()},
        "gradients": {name: _boxes(parameter.grad) for name, parameter in parameters.items()},
        "exp_avg": {name: _boxes(state["exp_avg"]) for name, state in kept.items()},
        "exp_avg_sq": {name: _boxes(state["exp_avg_sq"]) for name, state in kept.items()},
    }


def _boxes(tensor: torch.Tensor | None) -> list[dict[str, list[int]]]:
    """Rows and columns of the whole weight, from and to, that this rank has in memory."""
    from accel_ckpt.parts import Part, is_divided, parts_of

    assert tensor is not None, "a trained parameter has a gradient"
    parts = parts_of(tensor) if is_divided(tensor) else [Part.whole(tensor)]
    return [
        {
            name: [begin, begin + size]
            for name, begin, size in zip(("rows", "columns"), part.offsets, part.tensor.shape, strict=True)
        }
        for part in parts
    ]
