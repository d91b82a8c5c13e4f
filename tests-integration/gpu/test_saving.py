"""A save of device memory in the background: how long training stands still, and whether the checkpoint is right."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from testkit.figures import Figure, NotRunError, Run

LAYERS = 24
OF_A_BLOCKING_SAVE = 0.1


def asynchronous(run: Run) -> Iterator[Figure]:
    """`save_state(asynchronous=True)` while training goes on, and `load_state` of what it wrote."""
    width = run.pick(32, 2048)  # 0.4 GB of weights at full size, 1.2 GB with AdamW's states
    need = 4 * LAYERS * width * width * 12
    if (free := shutil.disk_usage(run.folder).free) < need:
        raise NotRunError(f"needs {need / 1e9:.1f} GB of disk, and {run.folder} has {free / 1e9:.1f} GB")
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    plain = nn.Sequential(*layers)
    accelerator = run.accelerator()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
    batch = torch.randn(run.pick(8, 1024), width, device=run.device)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        run.synchronize()

    def state() -> list[Tensor]:
        moments = [value for each in optimizer.state.values() for value in each.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]

    for _ in range(3):
        step()
    usual = statistics.median(run.seconds(step) for _ in range(run.pick(3, 21)))
    blocking = run.seconds(lambda: accelerator.save_state(run.folder / "blocking"))
    shutil.rmtree(run.folder / "blocking")

    first, _ = _stall(run, "first", accelerator.save_state, step, usual)
    shutil.rmtree(run.folder / "first")
    expected = state()
    stall, steps = _stall(run, "later", accelerator.save_state, step, usual)
    changed = sum(not torch.equal(*pair) for pair in zip(state(), expected, strict=True))
    accelerator.load_state(run.folder / "later")
    wrong = sum(not torch.equal(*pair) for pair in zip(state(), expected, strict=True))
    assert changed == len(expected), "training changed nothing, so the check could not fail"
    note = f"of {len(expected)}, all of which {steps} steps changed while it was written"
    yield run.exact("tensors unlike those when the save was called", wrong, 0, "", note)
    note = f"of all steps until it is on the disk; the first save's: {first * 1e3:.3g} ms; a step: {usual * 1e3:.3g} ms"
    yield Figure("stall", stall * 1e3, "ms", note=note)
    note = f"which takes {blocking * 1e3:.3g} ms for {need / 4e9:.3g} GB"
    yield run.at_most("stall over a save that is waited for", stall / blocking, OF_A_BLOCKING_SAVE, "x", note)


def _stall(
    run: Run, name: str, save: Callable[..., object], step: Callable[[], None], usual: float
) -> tuple[float, int]:
    """Seconds by which a save makes training longer until it is durable, and the steps in that time."""
    run.synchronize()
    began = time.perf_counter()
    handle = save(run.folder / name, asynchronous=True)
    steps = 0
    while not handle.done() or steps == 0:  # type: ignore[attr-defined]
        step()
        steps += 1
    spent = time.perf_counter() - began
    handle.result()  # type: ignore[attr-defined]
    return max(0.0, spent - steps * usual), steps


@pytest.mark.gpu(small_on_cpu=True)
def test_save(judge):
    judge(asynchronous, seconds=90)
