"""Muon in worlds of several ranks, against one process with all samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds


class Experts(nn.Module):
    """Every token visits every expert, weighed by a router."""

    def __init__(self, count, width, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, inner) / inner**0.5)

    def forward(self, x, weights):
        hidden = torch.tanh(torch.einsum("bw,eiw->bei", x, self.up))
        return torch.einsum("bei,ewi,be->bw", hidden, self.down, weights)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = Experts(3, width, inner)

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.down(torch.tanh(self.up(normed)))
        return x + self.experts(x, torch.softmax(self.router(x), -1))


class Model(nn.Module):
    def __init__(self, width=6, inner=10):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.unused = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 12)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(hidden)


def build():
    torch.manual_seed(0)
    model = Model().double()
    model.unused.requires_grad_(False)
    return model


def batches(count, first=0):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 12, (first + count, 8), generator=generator)[first:]


def optimizer_of(model, **options):
    from accel_train import muon_with_adamw

    options = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 3e-3, "bucket_bytes": 300, **options}
    return muon_with_adamw(model, **options)


def train(accelerator, model, optimizer, chosen):
    ranks = accelerator.strategy.batch
    for batch in chosen:
        x = batch.chunk(ranks.size)[ranks.index]
        with accelerator.accumulate(model):
            logits = model(x)
            accelerator.backward(nn.functional.cross_entropy(logits, (x + 1) % 12))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def prepared(kind, **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    model = build()
    arguments = {}
    if "fsdp2" in kind or kind == "hsdp":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=["Block"], **({"dp_replicate_size": 2} if kind == "hsdp" else {})
        )
    if "tp" in kind:
        degrees = (
            {"dp_shard_size": 2} if "fsdp2" in kind else {"dp_replicate_size": 2} if "ddp" in kind else {}
        )
        arguments["parallelism_config"] = ParallelismConfig(tp_size=2, **degrees)
    accelerator = Accelerator(cpu=True, **arguments)
    if "tp" in kind:
        divide(model, accelerator.torch_device_mesh["tp"])
    optimizer = optimizer_of(model, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def divide(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trained(kind, **options):
    accelerator, model, optimizer = prepared(kind, **options)
    train(accelerator, model, optimizer, batches(4))
    return accelerator.get_state_dict(model)


KINDS = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("tp", 2),
    pytest.param("hsdp", 4, marks=pytest.mark.full),
    pytest.param("fsdp2 x tp", 4, marks=pytest.mark.full),
    pytest.param("ddp x tp", 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_training_is_that_of_one_process(kind, ranks):
    [right] = worlds.run(trained, 1, "single")
    before = build().state_dict()
    for found in worlds.run(trained, ranks, kind):
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
            assert name.startswith("unused") or not found[name].equal(before[name])
