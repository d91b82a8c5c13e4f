"""`save_state` on the main process alone, while the other ranks wait for it somewhere else."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit.worlds import run

BATCHES = 6  # of each rank


def accelerator_of(**arguments: Any) -> Any:
    from accel_train import Accelerator, DataLoaderConfiguration

    return Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), **arguments)


def build(accelerator: Any, seed: int, norm: bool = False) -> Any:
    torch.manual_seed(seed)
    width = 4
    layers = [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Linear(width, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(7)
    samples = BATCHES * 2 * accelerator.num_processes
    data = TensorDataset(
        torch.arange(samples), torch.randn(samples, width, generator=generator, dtype=torch.float64)
    )
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(data, batch_size=2, shuffle=True))


def cloned(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}


def as_diffusers_does(
    folder: str,
    *,
    every: int = 0,
    load: str | None = None,
    accumulation: int = 1,
    gathers: bool = True,
    norm: bool = False,
    epochs: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    """Train; every few steps the main process saves, and nobody waits for it on purpose."""
    accelerator = accelerator_of(gradient_accumulation_steps=accumulation, **arguments)
    model, optimizer, scheduler, loader = build(accelerator, 9 if load else 0, norm)
    torch.manual_seed(3)
    begin, step = 0, 0
    record: dict[str, Any] = {"weights": {}, "samples": {}, "saves": [], "said": []}
    if load is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.load_state(load)
        begin, step = loader.iteration, accelerator.step
    seen: list[int] = []
    for _ in range(begin, epochs):
        for index, x in loader:
            with accelerator.accumulate(model):
                loss = model(x).pow(2).mean()
                if gathers:
                    accelerator.gather(loss.detach().repeat(2))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen += index.tolist()
            if accelerator.sync_gradients:
                step += 1
                accelerator.step = step
                record["weights"][step] = cloned(accelerator, model)
                record["samples"][step], seen = seen, []
                if every and accelerator.is_main_process and step % every == 0:
                    began = time.monotonic()
                    accelerator.save_state(f"{folder}/step-{step}")
                    record["saves"].append(time.monotonic() - began)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/last")
    accelerator.end_training()
    record["random"] = torch.rand(3)
    return record


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("accumulation", "gathers", "norm"), [(1, True, False), (2, False, False), (1, False, True)]
)
def test_training_continues_exactly_from_what_the_main_process_saved(
    tmp_path: Path, ranks: int, accumulation: int, gathers: bool, norm: bool
) -> None:
    options: dict[str, Any] = {"accumulation": accumulation, "gathers": gathers, "norm": norm}
    oracle = run(as_diffusers_does, ranks, str(tmp_path / "oracle"), **options)
    saving = run(as_diffusers_does, ranks, str(tmp_path), every=2, **options)
    steps = sorted(oracle[0]["weights"])
    for rank in range(ranks):
        assert sorted(saving[rank]["weights"]) == steps
        for step in steps:  # saving changes nothing
            for name, value in oracle[rank]["weights"][step].items():
                assert torch.equal(saving[rank]["weights"][step][name], value)
    stopped = steps[-1] // 2 - steps[-1] // 2 % 2
    resumed = run(
        as_diffusers_does, ranks, str(tmp_path / "resumed"), load=str(tmp_path / f"step-{stopped}"), **options
    )
    for rank in range(ranks):
        assert sorted(resumed[rank]["weights"]) == [step for step in steps if step > stopped]
        for step, weights in resumed[rank]["weights"].items():
            assert resumed[rank]["samples"][step] == oracle[rank]["samples"][step]
            for name, value in oracle[rank]["weights"][step].items():
                assert torch.equal(weights[name], value), (rank, step, name)
