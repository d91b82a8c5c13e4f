"""Clipping of gradients that ranks hold parts of, by every type of norm, against one process with all samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from testkit import worlds

TYPES = (2.0, 1, 0.5, -1.0, math.inf, -math.inf, 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.out = nn.Linear(8, 2)  # two rows: some ranks of four hold none
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dead = nn.Parameter(torch.zeros(3))  # its gradient is zero
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.out(torch.tanh(self.first(x))) * self.scale + 0 * self.dead.sum()


def chosen(model, which):
    named = dict(model.named_parameters())
    if which == "some":
        return [parameter for name, parameter in named.items() if name.startswith("first")]
    return {
        "all": model.parameters(),
        "one": named["out.weight"],
        "number": named["scale"],
        "generator": (parameter for parameter in named.values()),
        "unused": [named["unused"], named["frozen"]],
        "none": [],
    }[which]


def prepared(kind, ranks):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

    model = Net().double()
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=ranks))
        plan = {"first": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    else:
        options = {"dp_replicate_size": 2} if kind == "hsdp" else {}
        options |= {"ignored_modules": "first"} if kind == "ignored" else {}
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    return accelerator, accelerator.prepare(model)


def gradients(model):
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare(kind, ranks):
    accelerator, model = prepared(kind, ranks)
    batches = 1 if kind == "tp" else ranks
    x = torch.randn(2 * batches, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x.chunk(batches)[accelerator.process_index % batches]
    wrong = []

    def check(what, clip, oracle):
        reference = Net().double()
        (reference(x).square().mean() * 10).backward()
        model.zero_grad()
        accelerator.backward(model(mine).square().mean() * 10)
        got, wanted = clip(model), oracle(reference)
        if wanted is not None and not (
            type(got) is torch.Tensor and torch.allclose(got.double(), wanted.double())
        ):
            wrong.append((what, got, wanted))
        found, right = gradients(model), gradients(reference)
        if found.keys() != right.keys() or any(not found[n].allclose(right[n]) for n in right):
            wrong.append((what, "gradients"))

    for norm_type in TYPES:
        for which in ("all", "some", "one", "number", "generator", "unused", "none"):
            check(
                (norm_type, which),
                lambda m, w=which, t=norm_type: accelerator.clip_grad_norm_(chosen(m, w), 0.1, norm_type=t),
                lambda m, w=which, t=norm_type: nn.utils.clip_grad_norm_(chosen(m, w), 0.1, norm_type=t),
            )
    for which in ("all", "one", "number", "generator"):
        check(
            ("value", which),
            lambda m, w=which: accelerator.clip_grad_value_(chosen(m, w), 0.01),
            lambda m, w=which: nn.utils.clip_grad_value_(chosen(m, w), 0.01),
        )
    for which in ("unused", "none"):  # torch fails without gradients
        check(
            ("value", which),
            lambda m, w=which: accelerator.clip_grad_value_(chosen(m, w), 0.01),
            lambda m: None,
        )
    return wrong


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param("fsdp2", 4, marks=pytest.mark.full), ("hsdp", 4), ("ignored", 2), ("tp", 2)],
)
@pytest.mark.full
def test_every_type_of_norm_is_that_of_one_process(kind, ranks):
    for wrong in worlds.run(compare, ranks, kind, ranks):
        assert wrong == []
