"""An asynchronous save in time: training steps, the copy in memory, the files that grow, the name that appears."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from testkit import worlds

WIDTH = 1536
STEPS_AFTER = 4  # after the checkpoint is complete


def record() -> dict[str, Any]:
    """Times in milliseconds since the first step."""
    with worlds.scratch() as folder:
        (facts,) = worlds.run(saved, 1, str(Path(folder) / "checkpoint"), timeout=120)
    return facts


def saved(target: str) -> dict[str, Any]:
    """Train, save once in the background, train on; a thread looks at the folder."""
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(8, WIDTH)

    def step() -> tuple[float, float]:
        begin = time.perf_counter()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return begin, time.perf_counter()

    for _ in range(3):
        step()
    accelerator.save_state(
        f"{target}-before", asynchronous=True
    ).result()  # the memory of the copy exists from here on
    seen: list[tuple[float, int]] = []
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(Path(target), seen, over))
    watcher.start()
    steps = [step() for _ in range(3)]
    begin = time.perf_counter()
    handle = accelerator.save_state(target, asynchronous=True)
    call = (begin, time.perf_counter())
    while not handle.done():
        steps.append(step())
    steps += [step() for _ in range(STEPS_AFTER)]
    over.set()
    watcher.join()
    files = sorted(path.name for path in Path(target).iterdir())
    start = steps[0][0]
    growing = [(when, size) for when, size in seen if size >= 0]
    named = next(when for when, size in seen if size < 0)
    return {
        "steps_ms": [[_ms(begin - start), _ms(end - start)] for begin, end in steps],
        "save_state_ms": [_ms(call[0] - start), _ms(call[1] - start)],
        "written_mb": [[_ms(when - start), round(size / 1e6, 1)] for when, size in _thinned(growing)],
        "named_ms": _ms(named - start),
        "checkpoint_mb": round(sum(path.stat().st_size for path in Path(target).iterdir()) / 1e6, 1),
        "files": files,
    }


def _watch(target: Path, seen: list[tuple[float, int]], over: threading.Event) -> None:
    """Note the bytes of the hidden folder that is written, and -1 when the folder has its name."""
    before = set(target.parent.iterdir())
    while not over.is_set():
        time.sleep(0.002)
        if target.exists():
            seen.append((time.perf_counter(), -1))
            return
        new = [path for path in target.parent.iterdir() if path not in before and path.is_dir()]
        sizes = []
        for path in [file for folder in new for file in folder.rglob("*")]:
            try:
                sizes.append(path.stat().st_blocks * 512)
            except FileNotFoundError:  # the folder has its name now, which the next look sees
                continue
        if sizes:
            seen.append((time.perf_counter(), sum(sizes)))


def _thinned(points: list[tuple[float, int]], count: int = 40) -> list[tuple[float, int]]:
    every = max(1, len(points) // count)
    return [*points[:-1:every], points[-1]]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
