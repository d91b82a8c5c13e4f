"""Time and memory of a language model's loss, forward and backward: in chunks, and with all logits as plain PyTorch.

Both are measured in turns in one process, after a check that their losses and gradients are equal. Memory is the growth
of the resident memory on a CPU (of a process that gives freed memory back at once), and that of the allocator on a GPU.

    hatch run bench:loss
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from accel_train import chunked_cross_entropy
from testkit.memory import freed_at_once, growth

SHAPES = [(4096, 32_000, 64), (4096, 32_000, 1024), (8192, 128_256, 2048)]


def measured(
    function: Callable[..., Any], tensors: tuple[Any, ...], device: str
) -> tuple[float, int, list[Any]]:
    """Seconds, bytes at the peak, loss and gradients."""
    hidden, weight, labels = tensors
    hidden.grad = weight.grad = None

    def step() -> Any:
        loss = function(hidden, weight, labels)
        loss.backward()
        return loss

    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        took, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() - before
    else:
        with growth() as grown:
            began = time.perf_counter()
            loss = step()
            took = time.perf_counter() - began
        peak = grown.peak
    return took, peak, [loss.detach(), hidden.grad, weight.grad]


def plain(hidden: Any, weight: Any, labels: Any) -> Any:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many shapes, the smallest first")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    freed_at_once()
    print(f"{device}, {options.dtype}, {torch.get_num_threads()} threads, medians of {options.rounds}")
    print(f"{'tokens':>7} {'vocabulary':>10} {'hidden':>6} {'chunk':>6} {'seconds':>8} {'peak MB':>8}")
    for tokens, vocabulary, width in SHAPES[: options.shapes]:
        torch.manual_seed(0)
        tensors = (
            torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True),
            (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype).requires_grad_(),
            torch.randint(vocabulary, (tokens,), device=device),
        )
        kinds: dict[str, Callable[..., Any]] = {
            str(size): lambda *given, size=size: chunked_cross_entropy(*given, chunk_size=size)
            for size in options.chunk_sizes
        }
        kinds["all"] = plain
        results = {kind: measured(function, tensors, device)[2] for kind, function in kinds.items()}
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        for found in results.values():
            for here, there in zip(found, results["all"], strict=True):
                assert (here.float() - there.float()).norm() <= bound * there.float().norm()
        del results, found, here, there
        runs: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, function in kinds.items():
                runs[kind].append(measured(function, tensors, device)[:2])
        for kind, seen in runs.items():
            took, peak = (statistics.median(values) for values in zip(*seen, strict=True))
            print(f"{tokens:7} {vocabulary:10} {width:6} {kind:>6} {took:8.3f} {peak / 2**20:8.0f}")


if __name__ == "__main__":
    main()
