"""A model whose layers do not all fit, in time: which are in memory, and which one computes.

The layers are on disk, mapped by accel-bigmodel with a limit of memory; the kernel says which of their pages are in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from testkit import worlds

LAYERS = 10
WIDTH = 2048
LIMIT = 80_000_000


def record() -> dict[str, Any]:
    """Times in milliseconds since the forward began."""
    with worlds.scratch() as folder:
        (facts,) = worlds.run(forwarded, 1, folder, timeout=120)
    return facts


def forwarded(folder: str) -> dict[str, Any]:
    """The third forward: the first learns the order of the layers."""
    from accel_bigmodel import dispatch_model, init_empty_weights, load_checkpoint_in_model
    from accel_ckpt import save_model

    save_model(_model(), folder)
    _out_of_memory(Path(folder))
    with init_empty_weights():
        model = _model().eval()
    load_checkpoint_in_model(model, folder, device_map={"": "disk"})
    model = dispatch_model(model, {"": "disk"}, host_memory=LIMIT)
    weights = [layer.weight for layer in model]
    computing: list[list[float]] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: computing.append([time.perf_counter()]))
        layer.register_forward_hook(lambda *_: computing[-1].append(time.perf_counter()))
    x = torch.randn(48, WIDTH)
    over = threading.Event()
    looks: list[tuple[float, list[float]]] = []
    watcher = threading.Thread(target=_watch, args=(weights, looks, over))
    with torch.no_grad():
        for _ in range(2):
            model(x)
        time.sleep(0.3)  # what is read ahead has been read
        computing.clear()
        watcher.start()
        start = time.perf_counter()
        model(x)
    over.set()
    watcher.join()
    every = max(1, len(looks) // 60)
    return {
        "layer_mb": round(weights[0].numel() * 4 / 1e6, 1),
        "limit_mb": round(LIMIT / 1e6, 1),
        "most_in_memory_mb": round(max(sum(shares) for _, shares in looks) * weights[0].numel() * 4 / 1e6, 1),
        "computing_ms": [[_ms(begin - start), _ms(end - start)] for begin, end in computing],
        "in_memory_when_computed": [layer.share for layer in model],
        "in_memory": [[_ms(when - start), shares] for when, shares in looks[::every]],
    }


class Layer(nn.Linear):
    """A layer that notes how much of its weight is in memory when it has computed."""

    share = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, as of any linear layer."""
        result = super().forward(x)
        self.share = round(_share_in_memory(self.weight), 2)
        return result


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _out_of_memory(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _watch(
    weights: list[torch.Tensor], looks: list[tuple[float, list[float]]], over: threading.Event
) -> None:
    while not over.is_set():
        looks.append((time.perf_counter(), [round(_share_in_memory(weight), 2) for weight in weights]))
        time.sleep(0.002)


def _share_in_memory(weight: torch.Tensor) -> float:
    """The share of a weight's pages that the kernel has in memory."""
    begin = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = weight.data_ptr() + weight.nbytes - begin
    answer = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), answer) != 0:
        raise OSError(ctypes.get_errno(), "mincore does not say which pages are in memory")
    return bytes(answer).count(1) / len(answer)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
