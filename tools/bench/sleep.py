"""States in host memory: how much of a device's memory is free, and the time beside plain copies of the same bytes.

On one simulated device, whose allocator counts as a real one's does and whose copies are the processor's, so compare
the ratios. The model is a stack of linear layers with gradients and AdamW states. Contenders take turns: plain copies
(`tensor.to("cpu")` of each tensor, and `tensor.to(device)` back, into new tensors, pageable and pinned by
`pin_memory()`), and `offload_states()` with `reload_states()`. Medians in ms over rounds; the first round makes the
host memory that later ones use again, and is shown by itself.

    hatch run bench:sleep
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import flags
from torch import Tensor, nn

from accel_train import Accelerator
from testkit import simulated_device, worlds


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, with all work on the device, and the result."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    result = work()
    torch.accelerator.synchronize()
    return 1000 * (time.perf_counter() - began), result


def states_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All tensors on the device, each once."""
    found = [t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
    found += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [tensor for tensor in found if tensor.device.type != "cpu"]


def measure(width: int, layers: int, rounds: int) -> dict[str, Any]:
    simulated_device.use("npu:1")
    accelerator = Accelerator()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, width, device=accelerator.device)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    tensors = states_of(model, optimizer)
    before = torch.accelerator.memory_allocated()
    after = 0
    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, there in (
            ("tensor.to('cpu')", lambda: [t.to("cpu") for t in tensors]),
            ("tensor.to('cpu').pin_memory()", lambda: [t.to("cpu").pin_memory() for t in tensors]),
        ):
            took, copies = timed(there)
            times.setdefault(f"{name}, there", []).append(took)
            took, back = timed(lambda copies=copies: [t.to(accelerator.device) for t in copies])
            times.setdefault(f"{name}, back", []).append(took)
            del back, copies
            torch.accelerator.empty_cache()  # as offload_states does, so that both get new memory
        times.setdefault("gc.collect(), a part of offload_states", []).append(timed(gc.collect)[0])
        for name, pinned in (("pinned", True), ("pageable", False)):
            took, _ = timed(lambda pinned=pinned: accelerator.offload_states(pin_memory=pinned))
            times.setdefault(f"offload_states, {name}", []).append(took)
            after = max(after, torch.accelerator.memory_allocated())
            took, _ = timed(accelerator.reload_states)
            times.setdefault(f"reload_states, {name}", []).append(took)
    return {"before": before, "after": after, "bytes": sum(t.nbytes for t in tensors), "times": times}


def main() -> None:
    """Measure, and print."""
    given = flags(__doc__, width=1024, layers=16, rounds=7)
    size = (given.width, given.layers, given.rounds)
    [found] = worlds.run(measure, 1, *size, environ={"ACCELERATE_USE_CPU": "false"}, timeout=600.0)
    size = found["bytes"]
    print(f"device memory in use: {found['before']} bytes before, {found['after']} after", end=" ")
    print(f"({found['after'] / found['before']:.3%}); {size / 2**20:.0f} MiB of states")
    for name, (first, *others) in found["times"].items():
        median = statistics.median(others)
        rate = size / 1e6 / median
        print(f"{name:40} {median:8.1f} ms  {rate:6.2f} GB/s   (first {first:.1f} ms)")


if __name__ == "__main__":
    main()
