"""A model in host memory computes on the device at the rate of the link."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_bigmodel import HostTransfer, cpu_offload, offload_stats, undispatch
from testkit.figures import Figure, Run
from testkit.gpt import GPT, random_ids

OF_THE_LINK = 0.9
OVER_INCUMBENT = 5.0


def decoder(run: Run) -> GPT:
    """In bfloat16 in host memory: 6.4 GB at full size, mostly in its blocks."""
    layers, width, heads = run.pick((3, 32, 2), (16, 4096, 32))
    with torch.device("meta"):
        model = GPT(layers, width, heads, 512, 64).to(torch.bfloat16).eval()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():  # the device draws random numbers much faster than the host
        drawn = torch.randn(parameter.shape, device=run.device) * 0.02
        parameter.data.copy_(drawn + (1 if parameter.dim() < 2 else 0))
    return model


def link_rate(run: Run) -> float:
    """Bytes per second from pinned host memory to the device; on the CPU, of a copy."""
    size = run.pick(1 << 20, 1 << 28)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not run.on_cpu)
    there = torch.empty(size, dtype=torch.uint8, device=run.device)

    def copies() -> None:
        for _ in range(8):
            there.copy_(host, non_blocking=True)

    run.seconds(copies)
    return 8 * size / min(run.seconds(copies) for _ in range(3))


class PlainOffload:
    """The idea in a few lines: each module's weights are copied when it is called, and dropped behind it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.host: dict[nn.Parameter, Tensor] = {}
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self.bring)
                module.register_forward_hook(self.drop)

    def bring(self, module: nn.Module, args: Any) -> None:
        """To the device."""
        for parameter in module.parameters(recurse=False):
            self.host[parameter] = parameter.data
            parameter.data = parameter.data.to(self.device, copy=True)

    def drop(self, module: nn.Module, args: Any, output: Any) -> None:
        """Back to what waits in host memory."""
        for parameter in module.parameters(recurse=False):
            parameter.data = self.host.pop(parameter)


def incumbent(model: GPT, run: Run) -> str:
    """Offload a model as the incumbent does; returns what did it."""
    if importlib.util.find_spec("accelerate") is None or run.on_cpu:
        PlainOffload(model, run.device)
        return "per-module copies in plain PyTorch (accelerate is not installed, or there is no device)"
    import accelerate

    accelerate.cpu_offload(model, execution_device=run.device)
    return f"accelerate {accelerate.__version__}"


@torch.no_grad()
def streamed(run: Run) -> Iterator[Figure]:
    """Ours against the link, and against the incumbent; all against the model on the device."""
    model = decoder(run)
    theirs = copy.deepcopy(model)
    ids = random_ids(1, 16, 512).to(run.device)
    resident = copy.deepcopy(model).to(run.device)
    expected = resident(ids).cpu()
    del resident
    weights = sum(parameter.nbytes for parameter in model.parameters())
    rate = link_rate(run)

    options = {"transfer": HostTransfer()} if run.on_cpu else {}
    cpu_offload(model, execution_device=run.device, **options)
    model(ids)
    with run.peak_memory() as peak:
        before = offload_stats(model)
        assert before is not None
        found = model(ids).cpu()
        after = offload_stats(model)
        assert after is not None
    moved = after.bytes_moved - before.bytes_moved
    different = int((found != expected).sum())
    yield run.exact("logits unlike those of the model on the device", different, 0, f"of {found.numel()}")
    yield run.within("weights on the device at one time", after.peak_bytes / weights, 0.9, "of all")
    mine = run.median_seconds(lambda: model(ids), run.pick(3, 7))
    note = f"{moved / mine / 1e9:.3g} GB/s of {rate / 1e9:.3g} GB/s from pinned memory; {moved / 1e9:.3g} GB a forward"
    yield run.at_least("rate over the link's", moved / mine / rate, OF_THE_LINK, "x", note)
    for nbytes in peak:
        yield Figure("peak device memory", nbytes / 1e6, "MB", note=f"weights take {weights / 1e6:.0f} MB")
    undispatch(model)

    which = incumbent(theirs, run)
    differs = "" if torch.equal(theirs(ids).cpu(), expected) else "; ITS OUTPUT DIFFERS"
    spent = run.median_seconds(lambda: theirs(ids), 3)
    note = f"{mine * 1e3:.3g} ms a forward against {spent * 1e3:.3g} ms: {which}{differs}"
    yield run.at_least("speed over the incumbent", spent / mine, OVER_INCUMBENT, "x", note)


@pytest.mark.gpu(small_on_cpu=True)
def test_offload(judge):
    judge(streamed, seconds=120)
