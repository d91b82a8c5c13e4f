"""Time and memory of a language model's loss, forward and backward: in chunks, and with all logits as plain PyTorch.

The contenders take turns in one process, after a check that their losses and gradients are equal. "float32" computes
all logits and casts them to float32, as models of transformers do; "16 bits" leaves them in bfloat16. Memory is the
growth of the resident memory on a CPU (of a process that gives freed memory back at once), and that of the allocator on
a GPU.

    hatch run bench:loss
    hatch run bench:loss --dtype bfloat16
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import flags, quartiles, ratios, table, turns
from torch.nn import functional

from accel_train import chunked_cross_entropy
from testkit.memory import freed_at_once, growth

SHAPES = [(4096, 32_000, 128), (2048, 128_256, 128), (8192, 128_256, 2048)]
FIRST = "float32"


def plain(hidden: Any, weight: Any, labels: Any) -> Any:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def in_16_bits(hidden: Any, weight: Any, labels: Any) -> Any:
    low = torch.bfloat16
    return functional.cross_entropy(functional.linear(hidden.to(low), weight.to(low)), labels)


def contenders(chunk_sizes: list[int]) -> dict[str, Callable[..., Any]]:
    chunked: dict[str, Callable[..., Any]] = {
        f"chunks of {size}": lambda *given, size=size: chunked_cross_entropy(*given, chunk_size=size)
        for size in chunk_sizes
    }
    return {FIRST: plain, "16 bits": in_16_bits, **chunked}


def inputs(
    tokens: int, vocabulary: int, width: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Hidden states, the head's weight, and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def measured(
    function: Callable[..., Any], tensors: tuple[Any, ...], device: str
) -> tuple[float, int, list[Any]]:
    """Seconds, bytes at the peak, loss and gradients."""
    hidden, weight, _ = tensors
    hidden.grad = weight.grad = None

    def step() -> Any:
        loss = function(*tensors)
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


def check(functions: dict[str, Callable[..., Any]], tensors: tuple[Any, ...], device: str) -> None:
    """See that losses and gradients are equal, to the precision of each."""
    wanted = measured(functions[FIRST], tensors, device)[2]
    for name, function in functions.items():
        exact = wanted[2].dtype == torch.float32 and name != "16 bits"
        for found, right in zip(measured(function, tensors, device)[2], wanted, strict=True):
            error = (found.float() - right.float()).norm() / right.float().norm()
            assert error <= (1e-4 if exact else 3e-2), (name, error)


def main() -> None:
    options = flags(__doc__, rounds=7, shapes=2, chunk_sizes=[256, 1024], dtype="float32")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    freed_at_once()
    print(f"{device}, {options.dtype}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    rows = []
    functions = contenders(options.chunk_sizes)
    for shape in SHAPES[: options.shapes]:
        tensors = inputs(*shape, device, getattr(torch, options.dtype))
        check(functions, tensors, device)
        calls = {
            name: lambda function=function, tensors=tensors: measured(function, tensors, device)[:2]
            for name, function in functions.items()
        }
        runs = turns(calls, options.rounds, warm=0)
        firsts = [took for took, _ in runs[FIRST]]
        for name, seen in runs.items():
            took, peaks = zip(*seen, strict=True)
            peak = f"{statistics.median(peaks) / 2**20:.0f}"
            rows.append(
                [*shape, name, f"{statistics.median(took):.2f}", quartiles(ratios(took, firsts)), peak]
            )
    table(["tokens", "vocabulary", "hidden", "loss", "seconds", "ratio", "peak MB"], rows)


if __name__ == "__main__":
    main()
