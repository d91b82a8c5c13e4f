"""Training, loading and saving on simulated devices: equal to the CPU, and in order where the device can tell."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import open_training_state
from accel_train import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accel_train.data import transfer
from testkit import simulated_device, worlds

pytestmark = pytest.mark.simulated


def on(kind: str) -> None:
    """Use the CPU, or four devices of a type."""
    if kind != "cpu":
        simulated_device.use(f"{kind}:4")


def counts() -> dict[str, int]:
    return torch.get_device_module(torch.accelerator.current_accelerator()).counts()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def make_loader(**options: Any) -> Iterable[Any]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, **options)


def step(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(kind: str, strategy: str, precision: str, folder: str | None = None) -> dict[str, Any]:
    """Losses and weights of two epochs, and how often the host waited in the second."""
    on(kind)
    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    degrees = ParallelismConfig(tp_size=2) if strategy == "tp" else None
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=degrees, mixed_precision=precision)
    assert accelerator.device.type == kind
    model = make_model()
    if strategy == "tp":  # the layer norm stays whole
        parallelize_module(
            model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())}
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(shuffle=True))
    torch.manual_seed(4)
    losses, waits = [], 0
    for epoch in range(2):
        before = counts()["synchronizations"] if kind != "cpu" else 0
        losses += [step(accelerator, model, optimizer, batch) for batch in loader]
        waits = counts()["synchronizations"] - before if kind != "cpu" else 0
        if epoch == 0 and folder is not None:
            accelerator.save_state(folder, asynchronous=True).result()
            accelerator.load_state(folder)
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": torch.stack(losses).cpu(), "weights": weights, "waits": waits}


@pytest.mark.wide(but=["single-1-bf16", "ddp-2-no", "fsdp2-2-bf16"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_training_equals_the_cpus(strategy, ranks, precision, tmp_path):
    found = {
        kind: worlds.run(
            train,
            ranks,
            kind,
            strategy,
            precision,
            str(tmp_path / kind),
            environ={"ACCELERATE_USE_CPU": wants},
        )
        for kind, wants in (("cpu", "true"), ("npu", "false"))
    }
    # Under autocast the CPU computes in bfloat16 what accelerators compute in float32.
    bound = 0 if precision == "no" else 0.02
    for cpu, simulated in zip(*found.values(), strict=True):
        for part in ("losses", "weights"):
            torch.testing.assert_close(simulated[part], cpu[part], rtol=bound, atol=bound)
        assert simulated["waits"] == 0  # no step of training makes the host wait


def test_a_type_of_device_without_a_row_in_the_table():
    known, unknown = (worlds.run(train, 2, kind, "ddp", "no") for kind in ("npu", "brandnew"))
    assert all(torch.equal(a["losses"], b["losses"]) for a, b in zip(known, unknown, strict=True))


def load(without: str | None) -> tuple[float, dict[str, int]]:
    """One epoch through a pinned loader that copies ahead, with a part of the order between streams left out."""
    on("npu")
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = make_loader(num_workers=1, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = counts()
    if without == "wait_event":
        transfer.StreamTransfer.finish = lambda self, ticket: ticket[0]
    if without == "record_stream":
        transfer._used_by = lambda leaf, stream: leaf
    for batch in loader:
        loss = step(accelerator, model, optimizer, batch)
    after = counts()
    simulated_device.check()
    return loss.item(), {key: after[key] - before[key] for key in after}


def test_a_pinned_loader_copies_all_bytes_while_the_host_goes_on():
    [(_, found)] = worlds.run(load, 1, None)
    assert found["to_device_async"] == 96 * 9 * 4
    assert found["to_device_sync"] == 0
    assert found["synchronizations"] == 0


@pytest.mark.parametrize("without", ["wait_event", "record_stream"])
def test_an_order_that_is_left_out_is_noticed(without):
    with pytest.raises(worlds.RankError, match="unordered access to memory"):
        worlds.run(load, 1, without)


def save(folder: str) -> None:
    on("npu")
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    batches = iter(loader)
    step(accelerator, model, optimizer, next(batches))
    for number in range(3):
        wanted = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        handle = accelerator.save_state(f"{folder}/{number}", asynchronous=True)
        for _ in range(2):
            step(accelerator, model, optimizer, next(batches))
        handle.result()
        [saved] = open_training_state(f"{folder}/{number}").models
        assert all(torch.equal(saved[name], value) for name, value in wanted.items())


def test_an_asynchronous_save_holds_the_values_of_the_call(tmp_path: Path):
    worlds.run(save, 1, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
