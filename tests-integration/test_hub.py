"""Uploading and loading by repository on several ranks, against a local stand-in for the hub (`testkit.hub`)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from accel_ckpt import save_model
from testkit import hub as fake
from testkit import worlds

pytest.importorskip("huggingface_hub", reason="the extra accel-ckpt[hub] is not installed")

WEIGHTS = {"0.weight": torch.arange(400.0).reshape(20, 20), "0.bias": torch.ones(20)}


@pytest.fixture
def hub():
    with fake.serve() as running:
        yield running


def _save_and_push(folder, repository):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(20, 20)))
    try:
        accelerator.save_model(model, folder, push_to_hub=repository, private=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return accelerator.unwrap_model(model)[0].weight.tolist()


def test_an_accelerator_uploads_once_and_all_ranks_hear_of_a_failure(hub, tmp_path):
    settings = hub.environ(tmp_path / "hf")
    first, second = worlds.run(_save_and_push, 2, tmp_path / "out", "org/net", environ=settings)
    assert first == second == load(hub.files("org/net")["model.safetensors"])["0.weight"].tolist()
    assert len(hub.requests("POST", "/commit/")) == 1
    hub.failures["/commit/"] = 503
    first, second = worlds.run(_save_and_push, 2, tmp_path / "out", "org/new", environ=settings)
    assert first.startswith("CheckpointSaveError: uploading to org/new failed")
    assert "uploading the model to org/new failed on another rank" in second


def _load_broadcast(repository):
    from accel_ckpt import load_checkpoint_in_model
    from accel_train import Accelerator

    Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(20, 20))
    load_checkpoint_in_model(model, repository, broadcast_from_rank0=True)
    return model[0].weight.sum().item()


def test_rank_0_downloads_for_all(hub, tmp_path):
    save_model(WEIGHTS, tmp_path / "made")
    hub.add("org/net", {"model.safetensors": (tmp_path / "made" / "model.safetensors").read_bytes()})
    sums = worlds.run(_load_broadcast, 2, "org/net", environ=hub.environ(tmp_path / "hf"))
    assert sums == [WEIGHTS["0.weight"].sum().item()] * 2
    assert len(hub.requests("GET", "model.safetensors")) == 1
