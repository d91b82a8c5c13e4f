"""How far one call of a user travels through the packages: calls, files, and moves from file to file.

Rank 0 of two gloo ranks is followed through each journey by `sys.setprofile`; only functions of the five packages are
counted, and not what runs while modules are imported. "First" is the first journey of a process, "later" the same once
more, with new objects. The numbers vary by a few calls with which rank waits for the other.

    hatch run bench:journeys
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from types import FrameType
from typing import Any

import torch
from measure import flags, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

NAMES = ("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli")
PACKAGES = tuple(f"/{name}/" for name in NAMES)
LAUNCH = ["launch", "--cpu", "--num_processes", "2", "--use_fsdp", "--dry_run", __file__]


@dataclass
class Journey:
    """What was called, in order of the calls."""

    files: list[str] = field(default_factory=list)

    def figures(self) -> tuple[int, int, int]:
        """Calls, files, and how often a call leads into another file."""
        moves = sum(first != second for first, second in itertools.pairwise(self.files))
        return len(self.files), len(set(self.files)), moves


@contextmanager
def followed() -> Iterator[Journey]:
    """Note the functions of the packages that this thread calls."""
    journey = Journey()
    imports = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal imports
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            imports += 1 if event == "call" else -1
            return
        path = frame.f_code.co_filename
        if event == "call" and not imports and "/src/" in path and any(name in path for name in PACKAGES):
            journey.files.append(path)

    sys.setprofile(note)
    try:
        yield journey
    finally:
        sys.setprofile(None)


def train(strategy: str, folder: str) -> list[dict[str, Journey]]:
    """All journeys of a training with one strategy, on one rank, twice."""
    return [_train(strategy, f"{folder}/{turn}") for turn in range(2)]


def _train(strategy: str, folder: str) -> dict[str, Journey]:
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    found: dict[str, Journey] = {}

    def take(name: str, work: Callable[[], Any]) -> Any:
        with followed() as found[name]:
            return work()

    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    accelerator = take("Accelerator()", lambda: Accelerator(fsdp_plugin=plugin))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.ones(32, 4))
    loader = take(
        "prepare a loader", lambda: accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
    )
    model, optimizer = take("prepare model and optimizer", lambda: accelerator.prepare(model, optimizer))
    batches = iter(loader)
    next(batches)
    for _ in range(20):  # as long as the first windows are watched closely
        try:
            (x,) = take("a later batch", lambda source=batches: next(source))
        except StopIteration:
            batches = iter(loader)
            (x,) = next(batches)
        loss = take("forward", lambda x=x: model(x)).sum()
        take("backward", lambda loss=loss: accelerator.backward(loss))
        take("step", optimizer.step)
        optimizer.zero_grad()
    take("save_state", lambda: accelerator.save_state(folder))
    take("load_state", lambda: accelerator.load_state(folder))
    return found


def launch() -> list[Journey]:
    """`accel launch --use_fsdp --dry_run`, twice."""
    from accel_cli.app import main

    found = []
    for _ in range(2):
        with redirect_stdout(StringIO()), followed() as journey:
            assert main(LAUNCH) == 0
        found.append(journey)
    return found


def imported_by_launch() -> int:
    """Modules of the packages that a launcher imports."""
    code = (
        f"import sys; from accel_cli.app import main; main({LAUNCH!r}); "
        f"print(sum(name.partition('.')[0] in {NAMES!r} for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    flags(__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in ("ddp", "fsdp2"):
            first, later = worlds.run(train, 2, strategy, f"{folder}/{strategy}")[0]
            rows += [
                [f"{name}, {strategy}", *first[name].figures(), *later[name].figures()] for name in first
            ]
    first, later = launch()
    rows.append(["launch --use_fsdp --dry_run", *first.figures(), *later.figures()])
    table(["journey", "first: calls", "files", "moves", "later: calls", "files", "moves"], rows)
    print(f"\nfiles that launch --use_fsdp --dry_run imports: {imported_by_launch()}")


if __name__ == "__main__":
    main()
