"""What a training step costs on top of plain PyTorch: ours, Accelerate's and Lightning Fabric's.

The toy loop is an MLP 16-32-1 on batches of 8 with SGD and a scheduler, one thread: so small that the library is what
is measured. All contenders run in one process, in turn, round after round; the table shows medians and, for each
contender, the median of its per-round ratio to plain PyTorch. Final weights are checked to be equal.

    hatch run bench:step
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import flags, quartiles, ratios, seconds, turns
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

STEPS_PER_ROUND = 256
BATCH = 8
Epoch = Callable[[], None]
MODES = ("plain", "accumulate 4", "bf16", "ddp 2 ranks")


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    size = STEPS_PER_ROUND * BATCH * int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 16, generator=generator)
    targets = torch.randn(size, 1, generator=generator)
    return model, optimizer, scheduler, DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)


def raw(mode: str) -> tuple[nn.Module, Epoch]:
    model, optimizer, scheduler, loader = parts()
    plain = model
    if mode == "ddp 2 ranks":
        from torch.utils.data.distributed import DistributedSampler

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler: Any = DistributedSampler(loader.dataset, shuffle=False)  # type: ignore[arg-type]
        loader = DataLoader(loader.dataset, batch_size=BATCH, sampler=sampler)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if mode != "bf16":
            return model(x)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float()

    def epoch() -> None:
        for x, y in loader:
            loss = nn.functional.mse_loss(forward(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulating() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(forward(x), y) / 4
            loss.backward()
            if number % 4 == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain, accumulating if mode == "accumulate 4" else epoch


def _accelerate_like(accelerator: Any, mode: str) -> tuple[nn.Module, Epoch]:
    model, optimizer, scheduler, loader = parts()
    plain = model
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def epoch() -> None:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulating() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain, accumulating if mode == "accumulate 4" else epoch


def _options(mode: str) -> dict[str, Any]:
    options: dict[str, Any] = {"cpu": True}
    if mode == "bf16":
        options["mixed_precision"] = "bf16"
    if mode == "accumulate 4":
        options["gradient_accumulation_steps"] = 4
    return options


def ours(mode: str) -> tuple[nn.Module, Epoch]:
    from accel_train import Accelerator

    return _accelerate_like(Accelerator(**_options(mode)), mode)


def accelerate(mode: str) -> tuple[nn.Module, Epoch]:
    from accelerate import Accelerator

    return _accelerate_like(Accelerator(**_options(mode)), mode)


def fabric(mode: str) -> tuple[nn.Module, Epoch]:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    precision = "bf16-mixed" if mode == "bf16" else "32-true"
    if mode == "ddp 2 ranks":
        strategy = DDPStrategy(gradient_as_bucket_view=True)
        runner = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        runner.launch()
    else:
        runner = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer, scheduler, loader = parts()
    plain = model
    model, optimizer = runner.setup(model, optimizer)
    loader = runner.setup_dataloaders(loader)

    def epoch() -> None:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            runner.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulating() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            complete = number % 4 == 0
            with runner.no_backward_sync(model, enabled=not complete):
                loss = nn.functional.mse_loss(model(x), y)
                runner.backward(loss / 4)
            if complete:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain, accumulating if mode == "accumulate 4" else epoch


CONTENDERS: dict[str, Callable[[str], tuple[nn.Module, Epoch]]] = {
    "raw": raw,
    "ours": ours,
    "accelerate": accelerate,
    "fabric": fabric,
}


def measure(mode: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every round, per contender; runs on each rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    runs = {name: CONTENDERS[name](mode) for name in names}

    def turn(name: str) -> float:
        if mode == "ddp 2 ranks":
            torch.distributed.barrier()
        return seconds(runs[name][1]) / STEPS_PER_ROUND

    times = turns({name: lambda name=name: turn(name) for name in names}, rounds)
    reference = list(runs["raw"][0].parameters())
    # With two ranks torch's sampler deals samples in turn and the others batches in turn; the global batches, and so
    # the weights, agree up to the order of summation only where each step's two batches hold the same 16 samples.
    tolerance = {"rtol": 1e-4, "atol": 1e-6}
    for name, (model, _) in runs.items():
        for mine, theirs in zip(model.parameters(), reference, strict=True):
            torch.testing.assert_close(mine, theirs, **tolerance, msg=lambda text, n=name: f"{n}: {text}")
    return times


def report(mode: str, times: dict[str, list[float]]) -> None:
    for name, values in times.items():
        micro = statistics.median(values) * 1e6
        print(f"{mode:14}{name:12}{micro:9.1f} µs {quartiles(ratios(values, times['raw']), '.3f')}")


def main() -> None:
    given = flags(__doc__, rounds=31, only=list(CONTENDERS), modes=list(MODES))
    names = ["raw", *(name for name in given.only if name != "raw")]
    print(f"torch {torch.__version__}, {given.rounds} rounds of {STEPS_PER_ROUND} steps, interleaved")
    for mode in given.modes:
        ranks = 2 if mode == "ddp 2 ranks" else 1
        environ = {"TORCHELASTIC_RUN_ID": "bench"} if ranks == 2 else {}
        report(mode, worlds.run(measure, ranks, mode, names, given.rounds, environ=environ, timeout=600)[0])


if __name__ == "__main__":
    main()
