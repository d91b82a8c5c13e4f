"""Which rank reads which sample in which step, from prepared loaders of two ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from testkit import worlds

SAMPLES = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "even_batches=False": {"even_batches": False},
    "split_batches=True": {"split_batches": True},
    "dispatch_batches=True": {"dispatch_batches": True},
}


class Counted(Dataset[int]):
    """The numbers 0 to 9; it notes which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def record() -> dict[str, Any]:
    """By option, for each rank: its batches, what its dataset was asked for, and what metrics gather."""
    return {
        "samples": SAMPLES,
        "options": {name: worlds.run(read, 2, options) for name, options in OPTIONS.items()},
    }


def read(options: dict[str, Any]) -> dict[str, Any]:
    """One epoch on this rank. The loader's batch is 2, or 4 where both ranks share it."""
    from accel_train import Accelerator, DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    data = Counted()
    size = 4 if options.get("split_batches") else 2
    loader = accelerator.prepare(DataLoader(data, batch_size=size, shuffle=True))
    batches, gathered = [], []
    for batch in loader:
        batches.append(batch.tolist())
        if options.get("even_batches", True):
            gathered.append(accelerator.gather_for_metrics(batch).tolist())
    return {"batches": batches, "read": data.read, "gathered": gathered}
