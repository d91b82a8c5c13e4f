"""Saving what is divided among ranks: whole, or an error, by every way that a script can save."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from testkit import worlds


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def prepared(kind):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

    model = build()
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    else:
        replicas = 2 if kind == "hsdp" else None
        plugin = FullyShardedDataParallelPlugin(dp_replicate_size=replicas)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return accelerator, model, optimizer


def refused(save):
    from accel_train import DividedTensorError

    try:
        save()
    except DividedTensorError as error:
        return "get_state_dict" in str(error)
    return False


def by_every_way(kind):
    from safetensors.torch import save_file

    accelerator, model, optimizer = prepared(kind)
    state = model.state_dict()
    ways = {
        "state dict": lambda: torch.save(state, io.BytesIO()),
        "unwrapped": lambda: torch.save(accelerator.unwrap_model(model).state_dict(), io.BytesIO()),
        "a module of it": lambda: torch.save(accelerator.unwrap_model(model)[0].state_dict(), io.BytesIO()),
        "parameters": lambda: pickle.dumps(list(model.parameters())),
        "copies": lambda: pickle.dumps({k: v.detach().cpu().clone() for k, v in state.items()}),
        "another dtype": lambda: pickle.dumps({k: v.half() for k, v in state.items()}),
        "deep copy": lambda: pickle.dumps(copy.deepcopy(state)),
        "gradients": lambda: pickle.dumps([p.grad for p in model.parameters()]),
        "optimizer": lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
    }
    silent = [name for name, save in ways.items() if not refused(save)]
    with pytest.raises(RuntimeError):
        save_file(state, "never.safetensors")
    whole = io.BytesIO()
    torch.save(accelerator.get_state_dict(model), whole)  # plain tensors are pickled as ever
    whole.seek(0)
    return silent, torch.load(whole)


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("hsdp", 4), ("tp", 2)])
def test_a_pickle_of_parts_is_refused(kind, ranks):
    for silent, whole in worlds.run(by_every_way, ranks, kind):
        assert silent == []
        assert whole["0.weight"].shape == (6, 4)


def gathers(kind, folder):
    accelerator, model, optimizer = prepared(kind)
    accelerator.save({"weights": model.state_dict(), "epoch": 3}, folder / "all.pt")
    accelerator.save(optimizer.state_dict(), folder / "optimizer.pt")
    accelerator.save(model.state_dict(), folder / "all.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("fsdp2", 2), pytest.param("hsdp", 4, marks=pytest.mark.full), ("tp", 2)]
)
def test_save_on_all_processes_gathers(kind, ranks, tmp_path):
    from safetensors.torch import load_file

    wanted = worlds.run(gathers, ranks, kind, tmp_path)[0]
    saved = torch.load(tmp_path / "all.pt")
    assert saved["epoch"] == 3
    for found in (saved["weights"], load_file(tmp_path / "all.safetensors")):
        assert sorted(found) == sorted(wanted)
        assert all(type(value) is torch.Tensor and value.equal(wanted[name]) for name, value in found.items())
    fresh = build()
    fresh.load_state_dict(saved["weights"])
    moments = torch.load(tmp_path / "optimizer.pt")["state"]
    assert [moments[i]["exp_avg"].shape for i in range(4)] == [p.shape for p in fresh.parameters()]


def alone(folder):
    from accel_train import DividedTensorError

    accelerator, model, _ = prepared("fsdp2")
    message = ""
    if accelerator.is_main_process:
        try:
            accelerator.save(model.state_dict(), folder / "alone.pt")
        except DividedTensorError as error:
            message = str(error)
    else:
        try:
            accelerator.wait_for_everyone()
        except Exception as error:
            message = str(error)
    return message


def test_save_on_the_main_process_alone_is_refused_on_all(tmp_path):
    first, second = worlds.run(alone, 2, tmp_path)
    assert "Call save() on all processes" in first
    assert "save" in second
    assert not (tmp_path / "alone.pt").exists()


def different(folder):
    from accel_train import DividedTensorError

    accelerator, model, _ = prepared("fsdp2")
    state = model.state_dict()
    if accelerator.process_index:
        state.pop("0.bias")
    with pytest.raises(DividedTensorError, match="rank 1 passed 3 of other shapes"):
        accelerator.save(state, folder / "different.pt")


def test_other_tensors_on_another_rank_are_refused(tmp_path):
    worlds.run(different, 2, tmp_path)
