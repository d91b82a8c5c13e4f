"""What a rank holds of a model, its gradients and AdamW's moments, against the table of docs/guides/strategies.md.

Bytes are those of the storages of all live tensors; what a call takes on its way is resident memory, which a process
gives back at once here. `hatch run engines:deepspeed` runs the cases of DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from testkit import worlds
from testkit.memory import freed_at_once, growth, tensor_bytes

BLOCKS = 16
SMALL = 1 << 16  # inputs and losses
MARGIN = 24 << 20  # of resident memory: the allocator's, and libraries that are loaded on the way


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Case:
    """Bytes per parameter.

    Attributes:
        strategy: what is run.
        ranks: how many.
        kept: between steps.
        full: with the gradients of a backward.
        step: what the optimizer's step takes at most beyond that.
        units: whole blocks that a forward or backward takes beyond that, at most.
    """

    strategy: str
    ranks: int
    kept: float
    full: float
    step: float = 0.0
    units: float = 0.0


def accelerator_of(strategy, unit):
    from accel_train import (
        Accelerator,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        TorchTensorParallelPlugin,
    )

    if strategy == "tp":
        return Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    if strategy.startswith("deepspeed"):
        # Its own sizes are for models of billions: buckets of 2 GB, and all parameters below a billion stay gathered.
        sizes = {"reduce_bucket_size": unit}
        if strategy == "deepspeed3":
            names = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
            sizes |= dict.fromkeys(names, unit)
        zero = {"stage": int(strategy[-1]), **sizes}
        plugin = DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
        )
        return Accelerator(cpu=True, deepspeed_plugin=plugin)
    options = {"fsdp2": {}, "offload": {"cpu_offload": True}, "hsdp": {"dp_replicate_size": 2}}[strategy]
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))


def prepared(accelerator, strategy, width):
    with torch.device("meta"):
        model = Net(width)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if strategy == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = accelerator.torch_device_mesh["tp"]
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def measure(strategy, width, folder):
    """Bytes that this rank holds, and takes on its way."""
    freed_at_once()
    count = BLOCKS * 4 * width**2
    accelerator = accelerator_of(strategy, count // BLOCKS)
    before = tensor_bytes()
    model, optimizer = prepared(accelerator, strategy, width)
    found = {"parameters": count}
    for _ in range(2):
        x = torch.randn(4, width)
        found["kept"] = tensor_bytes() - before
        with growth() as forward:
            loss = model(x).square().mean()
        with growth() as backward:
            accelerator.backward(loss)
        del loss
        found["full"] = tensor_bytes() - before
        with growth() as step:
            optimizer.step()
        optimizer.zero_grad()
    found |= {"forward": forward.peak, "backward": backward.peak, "step": step.peak}
    with growth() as state:
        accelerator.save_state(folder + "/state")
    with growth() as saved:
        accelerator.save_model(model, folder + "/model")
    return found | {"save_state": state.peak, "save_model": saved.peak}


def sharded(strategy, ranks, replicas=1):
    share = replicas / ranks
    return Case(strategy, ranks, 12 * share, 16 * share, units=3)


full = pytest.mark.full
no_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="hatch run engines:deepspeed installs it"
)
CASES = [
    sharded("fsdp2", 2),
    pytest.param(sharded("offload", 2), marks=full),
    pytest.param(sharded("fsdp2", 4), marks=full),
    pytest.param(sharded("hsdp", 4, replicas=2), marks=full),
    pytest.param(Case("tp", 2, 12 / 2, 16 / 2), marks=full),
    pytest.param(Case("tp", 4, 12 / 4, 16 / 4), marks=full),
    pytest.param(Case("deepspeed1", 2, 4 + 12 / 2, 8 + 12 / 2, 4 / 2, 1), marks=no_deepspeed),
    pytest.param(Case("deepspeed2", 2, 4 + 12 / 2, 4 + 16 / 2, 8 / 2, 1), marks=no_deepspeed),
    pytest.param(Case("deepspeed3", 2, 20 / 2, 20 / 2, 12 / 2, 3), marks=no_deepspeed),
    pytest.param(Case("deepspeed3", 4, 20 / 4, 20 / 4, 12 / 4, 3), marks=[full, no_deepspeed]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.ranks}")
@pytest.mark.full
def test_a_rank_holds_its_share(tmp_path, request, case):
    width = 1024 if request.config.getoption("--full") else 768  # 67 or 38 million parameters
    for found in worlds.run(measure, case.ranks, case.strategy, width, str(tmp_path), timeout=180):
        print(json.dumps({name: value >> 20 for name, value in found.items()}))
        count = found["parameters"]
        block, tensor = 4 * count / BLOCKS, 2 * count / BLOCKS
        assert 0.99 * case.kept * count < found["kept"] <= case.kept * count + block + SMALL
        assert 0.99 * case.full * count < found["full"] <= case.full * count + block + SMALL
        gradients = max(0.0, case.full - case.kept) * count
        assert found["forward"] <= case.units * block + MARGIN
        assert found["backward"] <= gradients + case.units * block + MARGIN
        assert found["step"] <= case.step * count + tensor + MARGIN
        # States are copied for their digests in blocks of 16 MiB; of the model's 32 tensors rank 0 writes one while it
        # receives the next one from the ranks.
        assert found["save_state"] <= 4 * (1 << 24) + MARGIN < 4 * count
        assert found["save_model"] <= 10 * tensor + MARGIN < 4 * count
