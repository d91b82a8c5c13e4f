"""Which tensors of a training step have which dtype, by precision and strategy, from hooks in a real step."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from testkit import worlds

RUNS: dict[str, dict[str, Any]] = {
    "no": {"precision": "no"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, FSDP2": {"precision": "bf16", "sharded": True},
}

_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


class Net(nn.Module):
    """A product of matrices, a norm, and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


def record() -> dict[str, dict[str, str]]:
    """By run: the dtype of each tensor, on rank 0 of two."""
    return {name: worlds.run(stepped, 2, **run)[0] for name, run in RUNS.items()}


def stepped(precision: str, sharded: bool = False) -> dict[str, str]:
    """Dtypes in one step."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    torch.manual_seed(0)
    plain = Net()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    inner = accelerator.unwrap_model(model)
    found = {"weight, between steps": inner.first.weight.dtype}
    inner.first.register_forward_pre_hook(
        lambda module, inputs: found.update(
            {"input": inputs[0].dtype, "weight, given to the layer": module.weight.dtype}
        )
    )
    for name in ("first", "norm", "last"):
        getattr(inner, name).register_forward_hook(lambda *call, name=name: _seen(found, name, call[-1]))
    with mock.patch.object(dist, _REDUCE_SCATTER, _noted(found)):
        if not sharded:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                found["gradient, reduced"] = bucket.buffer().dtype
                return default_hooks.allreduce_hook(state, bucket)

            model.register_comm_hook(None, hook)
        while "optimizer state" not in found:  # fp16 skips steps until its loss scale fits
            output = model(torch.randn(4, 8))
            loss = output.square().mean()
            found |= {"output of the model": output.dtype, "loss": loss.dtype}
            accelerator.backward(loss)
            found["gradient of the weight"] = inner.first.weight.grad.dtype
            optimizer.step()
            optimizer.zero_grad()
            if not accelerator.optimizer_step_was_skipped:
                found["optimizer state"] = optimizer.state[inner.first.weight]["exp_avg"].dtype
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def _seen(found: dict[str, torch.dtype], name: str, output: torch.Tensor) -> None:
    found[f"output of {name}"] = output.dtype
    output.register_hook(lambda gradient: found.update({f"gradient of {name}'s output": gradient.dtype}))


def _noted(found: dict[str, torch.dtype]) -> Any:
    """The collective by which FSDP2 reduces gradients, with a note of the dtype."""
    original = getattr(dist, _REDUCE_SCATTER)

    def call(*args: Any, **kwargs: Any) -> Any:
        found["gradient, reduced"] = kwargs["input"].dtype
        return original(*args, **kwargs)

    return call
