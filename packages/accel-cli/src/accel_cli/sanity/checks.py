"""The checks of ``accel test``: each compares a result of the world with a plain computation.

A check is called on every rank with a ``Bench``, and raises ``AssertionError`` with the values that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.messages import shown
from accel_train import (
    Accelerator,
    broadcast,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
    skip_first_batches,
)

__all__ = ["CHECKS", "Bench"]

SAMPLES = 101
"""Not divisible by any usual number of ranks times the size of a batch, so that the last batch is uneven."""
_BATCH = 4
_TOLERANCES = {"no": 2e-5, "fp16": 5e-2, "bf16": 5e-2, "fp8": 2e-1}
"""Largest relative difference of losses and weights, by precision: ranks sum gradients in another order."""


@dataclass
class Bench:
    """The objects that the checks share.

    Attributes:
        accelerator: made by the configuration of the user.
        folder: one that all ranks of this machine can write to.
        found: the result of a check, for its line in the report.
    """

    accelerator: Accelerator
    folder: Path
    found: str = ""
    trained: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """Largest relative difference."""
        return _TOLERANCES.get(self.accelerator.mixed_precision, 5e-2)


def check_processes(bench: Bench) -> None:
    """Every rank has a different number, and one of them is the main process."""
    accelerator = bench.accelerator
    ranks = gather_object([accelerator.process_index])
    _equal("process_index of all ranks", sorted(ranks), list(range(accelerator.num_processes)))
    mains = gather_object([accelerator.is_main_process])
    _equal("main processes", sum(mains), 1)
    tensor = torch.ones(3, device=accelerator.device) * 2
    _equal(f"a sum on {accelerator.device}", float(tensor.sum()), 6.0)
    bench.found = (
        f"{accelerator.num_processes} x {accelerator.device.type}, {accelerator.distributed_type.value}, "
        f"mixed_precision {accelerator.mixed_precision}"
    )


def check_collectives(bench: Bench) -> None:
    """Gathering, reducing, broadcasting, padding, and objects."""
    accelerator = bench.accelerator
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    for dtype in (torch.float32, torch.int64):
        mine = torch.arange(3, device=device, dtype=dtype) + 10 * rank
        want = torch.cat([torch.arange(3, dtype=dtype) + 10 * other for other in range(size)])
        _close(f"gather of {dtype}", gather(mine).cpu(), want)
        total = torch.stack([torch.arange(3, dtype=dtype) + 10 * other for other in range(size)]).sum(0)
        _close(f"reduce (sum) of {dtype}", reduce(mine, reduction="sum").cpu(), total)
    mean = reduce(torch.full((2,), float(rank), device=device), reduction="mean").cpu()
    _close("reduce (mean)", mean, torch.full((2,), (size - 1) / 2))
    _close("broadcast", broadcast(torch.full((2,), float(rank), device=device)).cpu(), torch.zeros(2))
    padded = pad_across_processes(torch.ones(rank + 1, device=device), pad_index=-1).cpu()
    _close("pad_across_processes", padded, torch.cat([torch.ones(rank + 1), -torch.ones(size - rank - 1)]))
    objects = gather_object([{"rank": rank, "text": "é" * rank}])
    _equal("gather_object", objects, [{"rank": other, "text": "é" * other} for other in range(size)])
    accelerator.wait_for_everyone()
    bench.found = "gather, reduce, broadcast, pad, objects"


def check_data(bench: Bench) -> None:
    """Each sample is read once, in the order of a plain loader, with an uneven end and after a skip."""
    accelerator = bench.accelerator
    data = TensorDataset(torch.arange(SAMPLES))
    for shuffle in (False, True):
        set_seed(3)
        plain = [int(x) for (batch,) in DataLoader(data, batch_size=_BATCH, shuffle=shuffle) for x in batch]
        set_seed(3)
        loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=_BATCH, shuffle=shuffle))
        seen = [int(x) for (batch,) in loader for x in accelerator.gather_for_metrics(batch).cpu()]
        _equal(f"samples with shuffle={shuffle}", sorted(seen), list(range(SAMPLES)))
        if not shuffle:
            _equal("order of the samples", seen, plain)
        rest = [int(x) for (batch,) in skip_first_batches(loader, 2) for x in gather(batch).cpu()]
        _equal(f"samples after a skip with shuffle={shuffle}", len(set(rest)) < SAMPLES, True)
    bench.found = f"{SAMPLES} samples, shuffled and not, each read once"


def check_training(bench: Bench) -> None:
    """Losses, gradient norms and weights after a few steps are those of one process with the same global batches."""
    accelerator = bench.accelerator
    set_seed(0)
    model = _model()
    plain = _model()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = _batches(accelerator.num_processes * accelerator.gradient_accumulation_steps)
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=_BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, skipped = _train(accelerator, model, optimizer, loader)
    if not skipped:
        raise AssertionError(f"sync_gradients was false in all of {len(batches)} batches: no step was taken")
    want, want_norms = _plain_training(plain, batches, skipped)
    _near("losses", losses, want, bench.tolerance)
    if norms and not any(skipped):  # the norm of a skipped step is infinite
        _near("gradient norms", norms, want_norms, bench.tolerance)
    weights = accelerator.get_state_dict(model)
    if weights:  # of engines that divide the model the main process alone has them
        absent = [name for name in plain.state_dict() if name not in weights]
        _equal("weights that get_state_dict lacks", absent, [])
        for name, value in plain.state_dict().items():
            _near(
                name,
                weights[name].float().cpu().flatten().tolist(),
                value.flatten().tolist(),
                bench.tolerance,
            )
    bench.trained = {"model": model, "optimizer": optimizer, "loader": loader}
    bench.found = f"{len(losses)} steps, losses {losses[0]:.4f} to {losses[-1]:.4f}, as on one process"


def check_saving(bench: Bench) -> None:
    """Training that continues from a saved state has the same losses; a saved model has the weights."""
    accelerator = bench.accelerator
    model, optimizer, loader = (bench.trained[name] for name in ("model", "optimizer", "loader"))
    accelerator.save_state(bench.folder / "state")
    first = _train(accelerator, model, optimizer, loader)[0]
    accelerator.load_state(bench.folder / "state")
    again = _train(accelerator, model, optimizer, loader)[0]
    _equal("losses after load_state", again, first)
    accelerator.save_model(model, bench.folder / "model")
    accelerator.wait_for_everyone()
    names = sorted(path.name for path in (bench.folder / "model").iterdir())
    if not any(name.endswith(".safetensors") for name in names):
        raise AssertionError(f"save_model wrote {names}, and no safetensors file")
    bench.found = "save_state, load_state with equal losses, save_model"


CHECKS: tuple[tuple[str, Callable[[Bench], None]], ...] = (
    ("processes and devices", check_processes),
    ("collectives", check_collectives),
    ("data", check_data),
    ("training", check_training),
    ("saving and resuming", check_saving),
)
"""The checks with their names, in order."""


def _model() -> nn.Module:
    # The layer in the middle is one that computes in fp8.
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def _batches(size: int, steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    """``size`` batches for each step, in the order in which ranks read them."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(steps * size):
        x = torch.randn(_BATCH, 8, generator=generator)
        found.append((x, x.sum(dim=1, keepdim=True)))
    return found


def _plain_training(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], skipped: list[bool]
) -> tuple[list[float], list[float]]:
    """Losses and norms of one process that takes the batches of a step at once, in float32 on the CPU.

    Args:
        model: trained in place.
        batches: the batches of all ranks.
        skipped: which steps the other training did not take.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = len(batches) // len(skipped)
    losses, norms = [], []
    for step, skip in enumerate(skipped):
        xs, ys = (torch.cat(parts) for parts in zip(*batches[step * size : (step + 1) * size], strict=True))
        loss = nn.functional.mse_loss(model(xs), ys)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        if not skip:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def _train(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any
) -> tuple[list[float], list[float], list[bool]]:
    """One epoch.

    Returns:
        The loss of each optimizer step, the norm of its gradients where the engine reports it, and whether the step was
        skipped, which the scaler of fp16 does while it looks for its scale.
    """
    losses, norms, skipped, window = [], [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            window.append(float(reduce(loss.detach().float(), reduction="mean")))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                norms += [] if norm is None else [float(norm)]
                losses.append(sum(window) / len(window))
                window = []
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(bool(accelerator.optimizer_step_was_skipped))
            optimizer.zero_grad()
    return losses, norms, skipped


def _equal(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {shown(found)}; expected {shown(wanted)}")


def _close(what: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or not torch.allclose(found.double(), wanted.double()):
        raise AssertionError(f"{what}: {shown(found.tolist())}; expected {shown(wanted.tolist())}")


def _near(what: str, found: list[float], wanted: list[float], tolerance: float) -> None:
    if len(found) != len(wanted):
        raise AssertionError(
            f"{what}: {len(found)} values, {shown(found)}; one process has {len(wanted)}, {shown(wanted)}"
        )
    scale = max(max(map(abs, wanted)), 1e-3)
    # One by one: the largest of several differences can hide one that is not a number.
    if not all(abs(a - b) <= tolerance * scale for a, b in zip(found, wanted, strict=True)):
        raise AssertionError(
            f"{what}: {shown(found)}; one process has {shown(wanted)}, and {tolerance:g} of the largest is allowed"
        )
