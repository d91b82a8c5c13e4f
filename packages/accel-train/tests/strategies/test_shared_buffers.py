"""What is evaluated is what is saved: running averages of which each rank has its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def net():
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def options(kind):
    from accel_train import (
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        TorchTensorParallelPlugin,
    )

    if kind == "no broadcast":
        return {"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)]}
    if kind == "tp":
        return {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}
    replicas = 2 if kind == "hsdp" else None
    return (
        {"fsdp_plugin": FullyShardedDataParallelPlugin(dp_replicate_size=replicas)} if kind != "ddp" else {}
    )


def trained(kind):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, **options(kind))
    model = net()
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    place = accelerator.process_index // 2 if kind == "tp" else accelerator.process_index
    generator = torch.Generator().manual_seed(place)
    for _ in range(3):
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64) * (1 + 4 * place)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def evaluated(kind, inference):
    accelerator, model, _ = trained(kind)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = []
    for _ in range(2):  # once more after more training
        model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            mine = model(x)
        saved = net()
        saved.load_state_dict(accelerator.get_state_dict(model))
        saved.eval()
        with torch.no_grad():
            found.append((mine.clone(), saved(x)))
        model.train()
        accelerator.backward(model(x * (1 + accelerator.process_index)).square().mean())
    return found


@pytest.mark.parametrize(
    ("kind", "ranks", "inference"),
    [
        ("fsdp2", 2, False),
        ("fsdp2", 2, True),
        pytest.param("hsdp", 4, False, marks=pytest.mark.full),
        pytest.param("ddp", 2, False, marks=pytest.mark.full),
        ("no broadcast", 2, True),
        ("tp", 4, False),
    ],
)
def test_all_ranks_evaluate_what_is_saved(kind, ranks, inference):
    results = worlds.run(evaluated, ranks, kind, inference)
    for found in results:
        for (mine, _), (_, saved) in zip(found, results[0], strict=True):
            torch.testing.assert_close(mine, saved, rtol=0, atol=1e-12)


def alone():
    accelerator, model, _ = trained("no broadcast")
    own = [buffer.clone() for buffer in model.buffers()]
    if accelerator.is_main_process:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=torch.float64))
    accelerator.wait_for_everyone()
    return own, list(model.buffers())


def test_the_main_process_can_evaluate_alone_without_broadcasts():
    ranks = worlds.run(alone, 2)
    assert all(a.equal(b) for own, after in ranks for a, b in zip(own, after, strict=True))
    assert not ranks[0][0][0].equal(ranks[1][0][0]), "the ranks have averages of their own"


def kept():
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, **options("no broadcast"))
    model = net()
    model.register_buffer("seen", torch.zeros(1))
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
    accelerator.unwrap_model(model).seen.fill_(accelerator.process_index)
    model.eval()
    model(torch.ones(2, 4, dtype=torch.float64))
    return accelerator.unwrap_model(model).seen.item()


def test_without_broadcasts_other_buffers_stay_each_ranks_own():
    assert worlds.run(kept, 2) == [0, 1]
