"""What is recognised as a training state of Accelerate, and what its parts are read as.

Whether training continues from them is tested in ``tests-integration/test_foreign.py``.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from accel_ckpt import (
    AccelerateCheckpoint,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    accelerate_checkpoints,
    is_accelerate_checkpoint,
    load_optimizer_state,
    save_model,
    save_training_state,
)
from accel_state.errors import NotAvailableError
from accel_state.seeding import set_rng_state

FIXTURES = Path(__file__).parent.parent / "fixtures" / "accelerate-1.15"
KINDS = {
    "single": "single process or DDP",
    "ddp": "single process or DDP",
    "fsdp_full": "FSDP, full",
    "fsdp_sharded": "FSDP, sharded",
}


def state(name):
    return FIXTURES / name / "checkpoint"


@pytest.mark.parametrize("name", KINDS)
def test_the_layouts_are_told_apart(name):
    assert is_accelerate_checkpoint(state(name))
    checkpoint = AccelerateCheckpoint(state(name))
    models = 1 if name.startswith("fsdp") else 2
    assert checkpoint.kind == KINDS[name]
    assert checkpoint.ranks == ((0,) if name == "single" else (0, 1))
    parts = {
        "models": models,
        "optimizers": models,
        "schedulers": 1,
        "scalers": 0,
        "custom objects": models - 1,
    }
    assert checkpoint.parts() == parts
    assert checkpoint.loaders == (() if name.startswith("fsdp") else (0,))


def test_other_folders_are_none(tmp_path):
    save_model({"x": torch.ones(1)}, tmp_path / "model")
    ours = save_training_state(tmp_path / "ours", models=[], shared={}, per_rank={})
    shutil.copy(state("single") / "optimizer.bin", ours)
    (tmp_path / "empty").mkdir()
    for name in ("model", "ours", "empty", "gone"):
        assert not is_accelerate_checkpoint(tmp_path / name)
    with pytest.raises(
        CheckpointNotFoundError, match=r"no training state: it has neither a manifest\.json nor"
    ):
        AccelerateCheckpoint(tmp_path / "model")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint folder"):
        AccelerateCheckpoint(tmp_path / "gone")


def test_they_are_listed_by_number(tmp_path):
    for number in (10, 9):
        (tmp_path / f"checkpoint_{number}").symlink_to(state("single"))
    (tmp_path / "checkpoint_11").mkdir()
    (tmp_path / "checkpoint_x").symlink_to(state("single"))
    assert [path.name for path in accelerate_checkpoints(tmp_path)] == ["checkpoint_9", "checkpoint_10"]
    assert accelerate_checkpoints(tmp_path / "gone") == []


def test_both_kinds_of_fsdp_hold_the_same():
    full, sharded = (AccelerateCheckpoint(state(name)) for name in ("fsdp_full", "fsdp_sharded"))
    model = nn.Module()
    model.body, model.head = nn.Linear(4, 6), nn.Linear(6, 1, bias=False)
    optimizer = torch.optim.AdamW(
        [{"params": [model.body.bias]}, {"params": [model.body.weight, model.head.weight]}]
    )
    assert full.model(0).keys() == sharded.model(0).keys()
    assert all(torch.equal(full.model(0)[name], value) for name, value in sharded.model(0).items())
    one, two = (
        state.optimizer(0, [group["params"] for group in optimizer.param_groups], [model])
        for state in (full, sharded)
    )
    assert one["param_groups"] == two["param_groups"]
    assert one["param_groups"][0]["params"] == ["model_0.body.bias"]
    assert one["state"].keys() == two["state"].keys()
    for name, entries in one["state"].items():
        assert all(torch.equal(entries[key], two["state"][name][key]) for key in entries)
    load_optimizer_state(optimizer, two, [model])
    assert optimizer.state[model.head.weight]["step"] == 3


def test_a_part_that_is_not_there_is_named():
    with pytest.raises(CheckpointNotFoundError, match=r"holds no scheduler 4; it holds the numbers \[0\]"):
        AccelerateCheckpoint(state("single")).scheduler(4)
    with pytest.raises(
        CheckpointNotFoundError, match=r"no random_states_7\.pkl; it has those of the ranks \[0, 1\]"
    ):
        AccelerateCheckpoint(state("ddp")).rank(7)


def test_random_states_are_what_the_generators_had(tmp_path):
    content = {
        "step": 5, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }  # fmt: skip
    torch.save(content, tmp_path / "random_states_0.pkl")
    drawn = (random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist())
    own = AccelerateCheckpoint(tmp_path).rank(0)
    assert own.step == 5
    set_rng_state(own.rng)
    assert (random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist()) == drawn
    torch.save(
        {**content, "torch_cuda_manual_seed": [torch.get_rng_state()] * 2}, tmp_path / "random_states_0.pkl"
    )
    device = AccelerateCheckpoint(tmp_path).rank(0).rng["device"]
    assert device["type"] == "cuda"
    assert len(device["states"]) == 2
    del content["numpy_random_seed"]
    torch.save(content, tmp_path / "random_states_0.pkl")
    with pytest.raises(CorruptCheckpointError, match="numpy_random_seed"):
        AccelerateCheckpoint(tmp_path).rank(0)


class Custom:
    def __init__(self, value):
        self.value = value


def test_objects_need_trust(tmp_path):
    torch.save({"x": Custom(3)}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(UnsafeCheckpointError, match=r"it refers to .*Custom.*If you trust the file: say so"):
        AccelerateCheckpoint(tmp_path, opt_in="say so").custom(0)
    assert AccelerateCheckpoint(tmp_path, trusted=True).custom(0)["x"].value == 3


def test_plain_numpy_needs_none(tmp_path):
    content = {"a": np.arange(3), "b": np.float32(2), "c": np.zeros(0), "d": (1, "x", None)}
    torch.save(content, tmp_path / "custom_checkpoint_0.pkl")
    found = AccelerateCheckpoint(tmp_path).custom(0)
    assert found["a"].tolist() == [0, 1, 2]
    assert found["c"].shape == (0,)
    assert found["b"] == 2
    assert found["d"] == (1, "x", None)


def test_weights_as_pickles(tmp_path):
    torch.save({"_orig_mod.w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model_1.bin")
    torch.save({}, tmp_path / "scheduler.bin")
    checkpoint = AccelerateCheckpoint(tmp_path)
    assert checkpoint.model(0)["w"].tolist() == [1, 1]
    assert checkpoint.model(1)["w"].tolist() == [0, 0]
    save_model({"w": torch.full((2,), 5.0)}, tmp_path / "safe")
    shutil.copy(tmp_path / "safe" / "model.safetensors", tmp_path)
    assert AccelerateCheckpoint(tmp_path).model(0)["w"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("latest_checkpointed_iteration.txt", "written by Megatron-LM"),
        ("pytorch_model_fsdp_rank0.bin", "one flat file per rank"),
    ],
)
def test_what_is_not_read_is_named(mark, message, tmp_path):
    (tmp_path / "random_states_0.pkl").touch()
    (tmp_path / mark).touch()
    with pytest.raises(NotAvailableError, match=message):
        AccelerateCheckpoint(tmp_path)
