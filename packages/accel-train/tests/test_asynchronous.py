"""`save_state(asynchronous=True)` of one process; what happens in the background is tested in accel-ckpt."""

import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import CheckpointSaveError, SaveHandle, SaveInProgressError
from accel_ckpt.disk import LOCAL, Disk
from accel_train import Accelerator, ProjectConfiguration


def build(accelerator, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, model, optimizer, scheduler, loader, each_step=lambda number: None):
    number = 0
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            each_step(number)
            number += 1
    return [p.detach().clone() for p in model.state_dict().values()]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Failing(Disk):
    def write(self, descriptor, data):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_saving_at_every_step_changes_nothing_and_saves_the_same(tmp_path, accumulated, precision):
    def options():
        return {"gradient_accumulation_steps": accumulated, "mixed_precision": precision}

    plain = Accelerator(**options())
    expected = train(plain, *build(plain))

    synchronous = Accelerator(**options())
    train(
        synchronous, *build(synchronous), lambda number: synchronous.save_state(tmp_path / f"sync {number}")
    )
    accelerator = Accelerator(**options())
    found = train(
        accelerator,
        *build(accelerator),
        lambda number: accelerator.save_state(tmp_path / f"async {number}", asynchronous=True),
    )
    accelerator.end_training()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for number in range(12):
        assert content(tmp_path / f"sync {number}") == content(tmp_path / f"async {number}"), number


def test_the_kinds_of_answer(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    assert accelerator.save_state(tmp_path / "a") == tmp_path / "a"
    handle = accelerator.save_state(tmp_path / "b", asynchronous=True)
    assert isinstance(handle, SaveHandle)
    assert handle.result() == tmp_path / "b"


def test_automatic_names_count_at_the_call_and_pruning_follows(tmp_path):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    build(accelerator)
    for number in range(4):
        assert accelerator.save_iteration == number
        handle = accelerator.save_state(asynchronous=True)
        assert accelerator.save_iteration == number + 1
    handle.result()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    accelerator.save_state(asynchronous=True)
    assert accelerator.load_state().name == "checkpoint_4"  # waits for it


class Held(Disk):
    def __init__(self):
        self.gate = threading.Event()

    def write(self, descriptor, data):
        assert self.gate.wait(20)
        return super().write(descriptor, data)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_refused_while_another_goes_on(tmp_path, asynchronous):
    accelerator = Accelerator()
    build(accelerator)
    disk = accelerator._prepared.saver._disk = Held()
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    with pytest.raises(SaveInProgressError, match=f"{tmp_path}/a is still being saved"):
        accelerator.save_state(tmp_path / "b", asynchronous=asynchronous, when_busy="refuse")
    threading.Timer(0.1, disk.gate.set).start()
    accelerator.save_state(tmp_path / "b", asynchronous=asynchronous)
    accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("where", ["save_state", "load_state", "end_training", "result"])
def test_failures_surface(tmp_path, where):
    accelerator = Accelerator()
    build(accelerator)
    accelerator.save_state(tmp_path / "a")
    accelerator._prepared.saver._disk = Failing()
    handle = accelerator.save_state(tmp_path / "b", asynchronous=True)
    call = {
        "save_state": lambda: accelerator.save_state(tmp_path / "c"),
        "load_state": lambda: accelerator.load_state(tmp_path / "a"),
        "end_training": accelerator.end_training,
        "result": handle.result,
    }[where]
    with pytest.raises(CheckpointSaveError, match="Input/output error"):
        call()
    accelerator._prepared.saver._disk = LOCAL
    accelerator.load_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "c", asynchronous=True)
    accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_save_hooks_run_before_the_call_returns(tmp_path):
    accelerator = Accelerator()
    model, *_ = build(accelerator)
    weights_seen = []

    def hook(models, weights, folder):
        weights_seen.append(threading.current_thread() is threading.main_thread())
        weights[0]["0.weight"] = torch.zeros_like(weights[0]["0.weight"])

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    assert weights_seen == [True]
    accelerator.load_state(tmp_path / "a")
    assert model[0].weight.abs().sum() == 0


class ScheduleFree(torch.optim.SGD):
    """Has two sets of parameters, and switches between them in place."""

    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)

    train = eval


def test_optimizers_that_change_parameters_between_steps(tmp_path, monkeypatch):
    real = np.copyto
    monkeypatch.setattr(np, "copyto", lambda a, b: (threading.Event().wait(0.05), real(a, b)))
    accelerator = Accelerator()
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    handle = accelerator.save_state(tmp_path / "a", asynchronous=True)
    optimizer.eval()
    handle.result()
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(model.weight, before)


def test_an_accelerator_is_pickled_without_its_saves(tmp_path):
    accelerator = Accelerator()
    handle = accelerator.save_state(tmp_path / "a", asynchronous=True)
    other = pickle.loads(pickle.dumps(accelerator))
    assert other._prepared.saver._current is None
    handle.result()
    assert other.save_state(tmp_path / "b", asynchronous=True).result()
