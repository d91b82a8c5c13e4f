"""Trainings whose checkpoints are kept as test data, so that every later version is shown to continue them.

A run trains, saves, and trains on; what it computes afterwards is kept beside its checkpoint. A later version loads the
checkpoint into new objects and has to compute the same. The test is ``tests-integration/test_saved_runs.py``. To add
the runs of a strategy, from a checkout of the version that is to write them:

    PYTHONPATH=tools python -m testkit.saved_runs tests-integration/saved_runs/NAME ddp fsdp2
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from testkit import worlds
from testkit.conformance import (
    ENVIRONMENTS,
    Case,
    Samples,
    cloned,
    make_accelerator,
    make_model,
    make_optimizers,
)

RANKS = {
    "single": 1, "ddp": 2, "fsdp2": 2, "hsdp": 4, "tp": 2, "dp_shard x tp": 4, "deepspeed": 2, "zero3": 2, "xla": 1,
}  # fmt: skip
"""Members of the conformance suite, and the ranks that train them here."""
KINDS = ("plain", "window", "extras")
"""What is saved: an epoch in progress; an accumulation window in progress, with dropout; what a script adds."""
BEFORE, AFTER = 7, 8
"""Micro-batches before the save, which then is inside of a window, and after it."""
_WHOLE_WINDOWS = {"fsdp2", "hsdp", "tp", "dp_shard x tp", "deepspeed", "zero3", "xla"}
"""Members that save between windows only."""
_NOTES_ONLY = {"deepspeed", "zero3", "xla"}
"""Members whose extras are notes: engines step themselves, and an average failed on XLA when its runs were written."""


class Notes:
    """State of a script, with a tensor that every rank has another value of."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "last": torch.tensor(self.seen[-1:])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def case_of(member: str, kind: str) -> Case:
    """The training of a member."""
    return Case(
        member,
        accumulation=3 if kind == "window" else 1,
        dropout=kind == "window",
        optimizer="SGD" if kind == "window" else "AdamW",
        optimizers=2 if kind == "extras" and member not in _NOTES_ONLY else 1,
    )


def train(member: str, kind: str, folder: str, resume: bool) -> dict[str, Tensor]:
    """On one rank: train and save, or load; then train on.

    Args:
        member: of the conformance suite.
        kind: one of `KINDS`.
        folder: of the checkpoint.
        resume: load the checkpoint, instead of training and saving it.

    Returns:
        Losses of the micro-batches after the save, random numbers drawn then, and the final weights, whole.
    """
    from accel_train import DataLoaderConfiguration

    case = case_of(member, kind)
    accelerator = make_accelerator(
        case, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    model = make_model(case, seed=1 if resume else 0)
    optimizers = make_optimizers(case, model)
    scheduler = StepLR(optimizers[0], 2, 0.9)
    loader = DataLoader(
        Samples(5 * case.batch * accelerator.strategy.batch.size, case.dtype), case.batch, shuffle=True
    )
    model, loader, scheduler, *optimizers = accelerator.prepare(model, loader, scheduler, *optimizers)
    notes, average = Notes(), None
    if kind == "extras":
        accelerator.register_for_checkpointing(notes)
        if member not in _NOTES_ONLY:
            from accel_train import AveragedWeights

            accelerator.guard_steps(loss_spike=1e6, warmup=1)
            average = AveragedWeights(accelerator, model, decay=0.5)
    torch.manual_seed(17 if resume else 3 + accelerator.strategy.draws.index)
    if resume:
        accelerator.load_state(folder)
    batches = chain.from_iterable(iter(lambda: loader, None))
    losses: list[float] = []
    drawn: list[Tensor] = []

    def step(row: Any) -> None:
        _, x, y, _ = row
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            scheduler.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        losses.append(loss.item())
        notes.seen.append(loss.item())
        drawn.append(torch.rand(1))
        if average is not None:
            average.update()

    if not resume:
        # An epoch has five batches, so the windows of three end after the third and the last.
        inside = kind == "window" and member not in _WHOLE_WINDOWS
        for row in islice(batches, BEFORE if inside else BEFORE + 1):
            step(row)
        accelerator.save_state(folder)
        losses.clear()
        drawn.clear()
    for row in islice(batches, AFTER):
        step(row)
    weights = cloned(accelerator.get_state_dict(model))
    if average is not None:
        with average.applied():
            weights |= {
                f"average.{name}": value for name, value in cloned(accelerator.get_state_dict(model)).items()
            }
    if kind == "extras":
        weights["notes"] = torch.tensor(notes.seen, dtype=torch.float64)
    found = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "drawn": torch.cat(drawn),
        "rate": torch.tensor(scheduler.get_last_lr(), dtype=torch.float64),
    }
    return found | {f"weights.{name}": value for name, value in weights.items()}


def write(member: str, kind: str, folder: Path) -> None:
    """Write ``checkpoint`` and, for each rank, ``rank_N.safetensors`` with what it computed afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for rank, computed in enumerate(_run(member, kind, folder / "checkpoint", resume=False)):
        save_file(computed, folder / f"rank_{rank}.safetensors")


def differences(member: str, kind: str, folder: Path, bound: float) -> list[str]:
    """What a training that continues the kept checkpoint computes otherwise than the one that wrote it.

    Args:
        member: of the conformance suite.
        kind: one of `KINDS`.
        folder: as `write` makes it; it is not changed.
        bound: largest difference of an element; random numbers are equal in every bit.
    """
    found = []
    for rank, computed in enumerate(_run(member, kind, folder / "checkpoint", resume=True)):
        kept = load_file(folder / f"rank_{rank}.safetensors")
        if kept.keys() != computed.keys():
            found.append(f"rank {rank} has {sorted(kept.keys() ^ computed.keys())} only once")
            continue
        for name, value in kept.items():
            limit = 0.0 if name == "drawn" else bound
            if value.shape != computed[name].shape or not torch.allclose(
                computed[name], value, rtol=0, atol=limit
            ):
                found.append(f"rank {rank}: {name} is {computed[name]}, and was {value}")
    return found


def _run(member: str, kind: str, folder: Path, resume: bool) -> list[dict[str, Tensor]]:
    environ = ENVIRONMENTS.get(member)
    return worlds.run(train, RANKS[member], member, kind, str(folder), resume, environ=environ, timeout=120)


def folders(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Member, kind and folder of every run that is kept below ``root``."""
    for path in sorted(root.glob("*/*/checkpoint")):
        yield path.parent.parent.name.replace("_x_", " x "), path.parent.name, path.parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("members", nargs="+", choices=sorted(RANKS))
    options = parser.parse_args(arguments)
    for member in options.members:
        for kind in KINDS:
            write(member, kind, options.folder / member.replace(" x ", "_x_") / kind)
            print(member, kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
