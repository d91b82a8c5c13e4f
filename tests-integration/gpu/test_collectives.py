"""A world of one process with the device's own collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from accel_state.launching.ports import reserve_port
from testkit.figures import Figure, NotRunError, Run

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


def world_of_one(run: Run) -> Iterator[Figure]:
    """As torchrun starts it: the process group, its collectives on the device, ours, and DDP."""
    import torch.distributed as dist

    expected = BACKENDS.get(run.device.type)
    if expected is None or not dist.is_backend_available(expected):
        raise NotRunError(f"PyTorch has no collectives for {run.device.type} here")
    with reserve_port() as port:
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "acceptance",
        }  # fmt: skip
        accelerator = run.accelerator()
    assert dist.is_initialized(), "the accelerator made no process group"
    here = dist.group.WORLD._get_backend(run.device).name()  # type: ignore[union-attr]
    yield Figure("backend", 1, here, expected, here == expected, f"ranks: {dist.get_world_size()}")

    size = run.pick(1 << 10, 1 << 26)
    values = torch.arange(size, dtype=torch.float32, device=run.device)
    summed = values.clone()
    dist.all_reduce(summed)
    gathered = torch.empty_like(values)
    dist.all_gather_into_tensor(gathered, values)
    answers = {
        "all_reduce": summed,
        "all_gather": gathered,
        "gather": accelerator.gather(values),
        "reduce": accelerator.reduce(values, "mean"),
        "pad": accelerator.pad_across_processes(values),
    }
    wrong = [
        name
        for name, answer in answers.items()
        if answer.device != values.device or not torch.equal(answer, values)
    ]
    if accelerator.gather_for_metrics([1, "two"], use_gather_object=True) != [1, "two"]:
        wrong.append("gather_object")
    accelerator.wait_for_everyone()
    yield run.exact("collectives with a wrong answer", len(wrong), 0, "", f"of 6 {', '.join(wrong)}".strip())
    yield run.exact("gradients of DDP unlike those without", _ddp_differs(run))
    dist.destroy_process_group()


def _ddp_differs(run: Run) -> int:
    torch.manual_seed(0)
    width = run.pick(8, 512)
    layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(3)]
    plain = nn.Sequential(*layers).to(run.device)
    batch = torch.randn(width, width, device=run.device)
    plain(batch).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad(set_to_none=True)
    nn.parallel.DistributedDataParallel(plain)(batch).square().mean().backward()
    pairs = zip((parameter.grad for parameter in plain.parameters()), expected, strict=True)
    return sum(mine is None or theirs is None or not torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.gpu(small_on_cpu=True)
def test_collectives(judge):
    judge(world_of_one)
