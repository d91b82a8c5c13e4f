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


class Layer(nn.Linear):
    """One weight; layers are called one after the other, as stages of a pipeline need it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Layers(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
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
    """One layer a rank."""
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    stages = PipelineParallelConfig(modules=["layers"])
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(pp_size=RANKS, pp_handler=stages)
    )
    return _trained(accelerator, Layers())


def _trained(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """What this rank holds after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, WIDTH)).square().mean())
    optimizer.step()
    parameters = dict(accelerator.unwrap_model(model).named_parameters())
    return {
        "parameters": {name: _boxes(parameter) for name, parameter in parameters.items()},
        "gradients": {name: _boxes(parameter.grad) for name, parameter in parameters.items()},
        **{
            key: {name: _boxes(optimizer.state[parameter][key]) for name, parameter in parameters.items()}
            for key in ("exp_avg", "exp_avg_sq")
        },
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
