"""Training states in Accelerate's layout.

The real one loads them in ``tests-integration/engines/test_accelerate.py``.
"""

import errno
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import (
    AccelerateCheckpoint,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    export_to_accelerate,
    optimizer_state_by_name,
    save_training_state,
)
from accel_ckpt.disk import Disk
from accel_state.seeding import get_rng_state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.head = nn.Linear(3, 1)


def save(folder, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [model.head.bias]}, {"params": [model.head.weight, model.a.weight]}]
    )
    model.head(model.b(model.a(torch.ones(2, 3)))).sum().backward()
    optimizer.step()
    save_training_state(
        folder,
        models=[model.state_dict(), {"x": torch.ones(4)}],
        shared={
            "step": 6,
            "optimizer_0": optimizer_state_by_name(optimizer, [model]),
            "scheduler_0": {"last_epoch": 2, "base_lrs": [0.1]},
            "scaler": {"scale": 8.0, "pending": {}},
            "custom_0": {"seen": 3, "tuple": (1, 2)},
            "custom_1": np.arange(3),
            **options.get("shared", {}),
        },
        per_rank={"rng": get_rng_state(), **options.get("per_rank", {})},
        max_shard_size=options.get("max_shard_size", "1GB"),
        safe_serialization=options.get("safe_serialization", True),
    )
    return model, optimizer


@pytest.mark.parametrize("size", ["1GB", "40B"])
@pytest.mark.parametrize("safe", [True, False])
def test_every_part_has_its_file(safe, size, tmp_path):
    model, optimizer = save(tmp_path / "ours", max_shard_size=size, safe_serialization=safe)
    assert export_to_accelerate(tmp_path / "ours", tmp_path / "theirs") == ()
    stem, extension = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == sorted(
        [
            f"{stem}.{extension}", f"{stem}_1.{extension}", "optimizer.bin", "scheduler.bin", "scaler.pt",
            "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "random_states_0.pkl",
        ]
    )  # fmt: skip
    drawn = (random.random(), np.random.rand(2).tolist(), torch.rand(2).tolist())
    states = torch.load(tmp_path / "theirs" / "random_states_0.pkl", weights_only=False)
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    assert (random.random(), np.random.rand(2).tolist(), torch.rand(2).tolist()) == drawn
    assert states["step"] == 6
    assert torch.load(tmp_path / "theirs" / "scaler.pt", weights_only=True) == {"scale": 8.0}
    saved = torch.load(tmp_path / "theirs" / "optimizer.bin", weights_only=True)
    expected = optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert all(torch.equal(entries[key], saved["state"][number][key]) for key in entries)
    assert torch.load(tmp_path / "theirs" / "custom_checkpoint_0.pkl", weights_only=True)["tuple"] == (1, 2)
    again = AccelerateCheckpoint(tmp_path / "theirs").model(0)
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_extra_state_of_modules_needs_a_pickle(tmp_path):
    state = {"w": torch.ones(2), "_extra_state": {"version": 3}}
    save_training_state(tmp_path / "ours", models=[state], shared={}, per_rank={})
    export_to_accelerate(tmp_path / "ours", tmp_path / "theirs")
    assert torch.load(tmp_path / "theirs" / "pytorch_model.bin", weights_only=True)["_extra_state"] == {
        "version": 3
    }


def test_what_has_no_place_is_said(tmp_path):
    device = {**get_rng_state(), "device": {"type": "cuda", "states": [torch.get_rng_state()]}}
    save(
        tmp_path / "ours",
        shared={
            "loader_0": {"epoch": 2, "batches_yielded": 7, "finished": False},
            "loader_1": {"epoch": 0, "batches_yielded": 0},
            "mine": 1,
            "pickled_2": b"",
            "progress": {"save_iteration": 3},
        },
        per_rank={
            "loader_2": {"epoch": 1, "batches_yielded": 9, "finished": True},
            "windows": {"windows": [], "gradients": {"model_0.a.weight": torch.ones(1)}},
            "buffers": {"model_0.mean": torch.ones(1)},
            "replicas": [{}],
            "own": 1,
            "rng": device,
        },
    )
    notes = export_to_accelerate(tmp_path / "ours", tmp_path / "theirs")
    expected = [
        "loader.set_epoch(2) and skip_first_batches(loader, 7)",
        "'mine'",
        "object 2 was saved as a pickle",
        "unfinished accumulation window",
        "buffers of rank 0 differ",
        "the position of loader 2 is not in Accelerate's layout: go on in epoch 1 with loader.set_epoch(1) and "
        "skip_first_batches(loader, 0)",
        "rank 0 saved 'own'",
    ]
    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))
    states = torch.load(tmp_path / "theirs" / "random_states_0.pkl", weights_only=False)
    assert len(states["torch_cuda_manual_seed"]) == 1


def test_the_output_is_new_or_empty(tmp_path):
    save(tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    export_to_accelerate(tmp_path / "ours", tmp_path / "empty")
    assert load_file(tmp_path / "empty" / "model_1.safetensors")["x"].tolist() == [1, 1, 1, 1]
    with pytest.raises(CheckpointSaveError, match="not an empty folder"):
        export_to_accelerate(tmp_path / "ours", tmp_path / "empty")


def test_damage_is_found_before_anything_is_written(tmp_path):
    save(tmp_path / "ours")
    path = tmp_path / "ours" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors has the checksum"):
        export_to_accelerate(tmp_path / "ours", tmp_path / "theirs")
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]
    with pytest.raises(CheckpointNotFoundError):
        export_to_accelerate(tmp_path / "gone", tmp_path / "theirs")


def test_a_failing_disk_leaves_nothing(tmp_path):
    save(tmp_path / "ours")

    class Full(Disk):
        left = 3

        def open_new(self, path):
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open_new(path)

    with pytest.raises(CheckpointSaveError, match=r"writing .*theirs failed: .*No space left"):
        export_to_accelerate(tmp_path / "ours", tmp_path / "theirs", disk=Full())
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]
