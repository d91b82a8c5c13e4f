"""Batches get to the device from pinned memory on a stream of their own, whole, while the device computes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from testkit.figures import Figure, NotRunError, Run

BUSY_SECONDS = 0.01
_SLOTS = 16  # batches that workers, the pinning thread and this process hold at most


class Batches(Dataset[Tensor]):
    """Whole batches, each of one value, made without reading anything."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.size,), float(index + 1))


def busy(run: Run) -> Callable[[], None]:
    """A computation of about 10 ms that the device is asked for, and nobody waits for."""
    if run.on_cpu or not run.full:
        return lambda: None
    matrix = torch.randn(4096, 4096, device=run.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    one = run.median_seconds(lambda: compute(10), 3) / 10
    times = max(1, round(BUSY_SECONDS / one))
    return lambda: compute(times)


def pinned_and_ahead(run: Run) -> Iterator[Figure]:
    """The prepared loader against a loop that copies each batch when it needs it."""
    batch_bytes = run.pick(1 << 12, 1 << 25)
    free = shutil.disk_usage("/dev/shm").free
    if free < 2 * _SLOTS * batch_bytes:
        raise NotRunError(f"workers need shared memory, and /dev/shm has {free / 1e6:.0f} MB")
    data = Batches(run.pick(12, 100), batch_bytes // 4)

    def loader(**options: Any) -> DataLoader[Tensor]:
        return DataLoader(data, batch_size=None, num_workers=run.pick(1, 4), **options)

    accelerator = run.accelerator()
    ours = accelerator.prepare(loader(pin_memory=not run.on_cpu))
    plain = loader()
    work = busy(run)

    def epoch(batches: Iterable[Tensor]) -> tuple[float, list[Tensor]]:
        """Seconds per batch behind the first, in which workers start; and sums, computed behind the work."""
        sums = []
        began = 0.0
        for number, batch in enumerate(batches):
            if number == 1:
                run.synchronize()
                began = time.perf_counter()
            moved = batch.to(run.device)
            work()
            sums.append(torch.stack([moved.min(), moved.max()]))
        run.synchronize()
        return (time.perf_counter() - began) / (len(data) - 1), sums

    wrong = 0
    ours_seconds, plain_seconds = [], []
    for _ in range(run.pick(1, 3)):
        spent, sums = epoch(ours)
        ours_seconds.append(spent)
        expected = [torch.tensor([float(index + 1)] * 2) for index in range(len(data))]
        wrong += sum(not torch.equal(found.cpu(), right) for found, right in zip(sums, expected, strict=True))
        plain_seconds.append(epoch(plain)[0])
    size = f"{batch_bytes / 1e6:.3g} MB a batch"
    yield run.exact(
        "batches with a wrong value", wrong, 0, "", f"read behind other work of the device; {size}"
    )
    mine, theirs = min(ours_seconds), min(plain_seconds)
    note = f"{mine * 1e3:.3g} ms a batch against {theirs * 1e3:.3g} ms with blocking copies"
    yield run.at_least("speed over blocking copies", theirs / mine, 1.0, "x", note)


@pytest.mark.gpu(small_on_cpu=True)
def test_loader(judge):
    judge(pinned_and_ahead)
