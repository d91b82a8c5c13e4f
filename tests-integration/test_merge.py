"""Shards that several real ranks wrote with torch's writers are merged; and torch and transformers read our files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from accel_ckpt import load_checkpoint_in_model, merge_weights, save_model
from accel_train import Accelerator
from testkit import worlds

SHAPES = {"even": (8, 6), "uneven": (5, 6), "small": (1, 6), "vector": (7,)}


def weights():
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        for name, shape in SHAPES.items()
    }


def _write(folder, kind):
    """Each rank holds its shards of the same tensors; every placement that the shapes allow."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from accel_state import PartialState

    world = PartialState(cpu=True).num_processes
    line = init_device_mesh("cpu", (world,))
    placements = {"rows": (line, [Shard(0)]), "columns": (line, [Shard(1)]), "copies": (line, [Replicate()])}
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        placements |= {"mesh": (mesh, [Shard(0), Shard(1)]), "hybrid": (mesh, [Replicate(), Shard(0)])}
    state = {}
    for name, value in weights().items():
        for how, (mesh, where) in placements.items():
            if value.dim() > 1 or how in ("rows", "copies", "hybrid"):
                state[f"{name}.{how}"] = distribute_tensor(value, mesh, where)
    if kind == "dcp":
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(folder))
    else:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    return sorted(state)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_shards_of_several_ranks(kind, world, tmp_path):
    names = worlds.run(_write, world, tmp_path / "shards", kind)[0]
    merge_weights(tmp_path / "shards", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == names
    for name, value in found.items():
        assert torch.equal(value, weights()[name.split(".")[0]]), name


def _save_state(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from accel_ckpt import save_training_state
    from accel_state import PartialState

    mesh = init_device_mesh("cpu", (PartialState(cpu=True).num_processes,))
    state = {f"{name}.rows": distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights().items()}
    state["even.columns"] = distribute_tensor(weights()["even"], mesh, [Shard(1)])
    state["even.copies"] = distribute_tensor(weights()["even"], mesh, [Replicate()])
    state["even.tied"] = state["even.rows"]
    state["plain.buffer"] = torch.ones(3)
    optimizer = {
        "state": {"model_0.even.rows": {"exp_avg": state["even.rows"]}},
        "param_groups": [{"params": ["model_0.even.rows"], "lr": 0.1}],
    }
    save_training_state(folder, models=[state], shared={"step": 1, "optimizer_0": optimizer}, per_rank={})


def test_our_own_states_in_shards(tmp_path):
    from accel_ckpt import export_to_accelerate, open_weights

    worlds.run(_save_state, 3, tmp_path / "state")
    merge_weights(tmp_path / "state", tmp_path / "out")
    export_to_accelerate(tmp_path / "state", tmp_path / "theirs")
    opened = open_weights(tmp_path / "state")
    for folder in ("out", "theirs"):
        merged = open_weights(tmp_path / folder / "model.safetensors")
        assert set(merged.about) == set(opened.about)
        assert "even.tied" in merged.about
        for name in merged.about:
            expected = torch.ones(3) if name == "plain.buffer" else weights()[name.split(".")[0]]
            assert torch.equal(merged.tensor(name), expected), name
            assert torch.equal(opened.tensor(name), expected), name
    optimizer = torch.load(tmp_path / "theirs" / "optimizer.bin", weights_only=True)
    assert torch.equal(optimizer["state"][0]["exp_avg"], weights()["even"])


def read_with_torch(folder, state):
    """torch's own Hugging Face reader, without a process group."""
    empty = {name: torch.zeros_like(value) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(empty, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return empty


@pytest.mark.parametrize("size", ["1GB", "100B"])
def test_torch_reads_what_save_model_writes(size, tmp_path):
    save_model(weights(), tmp_path, max_shard_size=size)
    found = read_with_torch(tmp_path, weights())
    assert all(torch.equal(found[name], value) for name, value in weights().items())


def test_transformers_and_torch_read_the_model_of_a_training_state(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(transformers.BertForSequenceClassification(config))
    accelerator.register_save_state_pre_hook(
        lambda models, _, folder: models[0].config.save_pretrained(folder)
    )
    folder = accelerator.save_state(tmp_path / "state")
    expected = accelerator.get_state_dict(model)
    again = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.items())
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    merge_weights(folder, tmp_path / "out", max_shard_size="1KB")
    (tmp_path / "out" / "config.json").write_text((folder / "config.json").read_text())
    merged = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(merged.state_dict()[name], value) for name, value in expected.items())
    assert (
        len(
            set(
                json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())[
                    "weight_map"
                ].values()
            )
        )
        > 1
    )
    index = read_with_torch(tmp_path / "out", expected)
    assert all(torch.equal(index[name], value) for name, value in expected.items())


def test_a_checkpoint_of_fsdp_loads_into_a_model():
    folder = (
        Path(__file__).parent.parent / "packages" / "accel-ckpt" / "tests" / "fixtures" / "accelerate-1.15"
    )
    full = torch.load(folder / "fsdp_full" / "checkpoint" / "pytorch_model_fsdp.bin", weights_only=True)
    for source in (
        "fsdp_full/checkpoint",
        "fsdp_sharded/checkpoint",
        "fsdp_sharded/checkpoint/pytorch_model_fsdp_0",
    ):
        model = torch.nn.ModuleDict(
            {"body": torch.nn.Linear(4, 6), "head": torch.nn.Linear(6, 1, bias=False)}
        )
        load_checkpoint_in_model(model, folder / source, strict=True)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in full.items())
