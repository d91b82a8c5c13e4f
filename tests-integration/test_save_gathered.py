"""Whole files of a model of which ranks hold parts."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors.torch import load_file

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
SHAPES = {"a.weight": (7, 3), "b.weight": (4, 5), "c": (), "empty": (0, 2)}


def whole(name):
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.bfloat16 if name.startswith("b") else torch.float32
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def held(rank, ranks, kind):
    """What a rank holds of each tensor; the last name is tied to the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accel_ckpt import Part

    state = {}
    for name, shape in SHAPES.items():
        value = whole(name)
        if not shape or not shape[0]:
            state[name] = value
        elif kind == "dtensor":
            state[name] = distribute_tensor(value, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        else:
            rows = list(range(shape[0]))[rank::ranks]  # every second row, a part each
            state[name] = [Part(value[row : row + 1], (row, 0), shape) for row in rows]
    state["tied"] = state["a.weight"]
    return state


class Full:
    """A disk that is full after some bytes."""

    def __init__(self, disk, room):
        self.disk, self.room = disk, room

    def __getattr__(self, name):
        return getattr(self.disk, name)

    def open_new(self, path):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.room -= 1
        return self.disk.open_new(path)


def save(folder, kind, safe=True, room=None, **options):
    from accel_ckpt import CheckpointError, save_gathered_model
    from accel_ckpt.disk import LOCAL
    from accel_state import PartialState

    state = PartialState()
    disk = LOCAL if room is None else Full(LOCAL, room)
    model = held(state.process_index, state.num_processes, kind)
    try:
        return save_gathered_model(model, folder, safe_serialization=safe, disk=disk, **options)
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["dtensor", "parts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_files_are_those_of_the_whole_model(tmp_path, kind, ranks):
    found = worlds.run(save, ranks, tmp_path / "model", kind)
    assert found == [("model.safetensors",)] * ranks
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == SHAPES.keys(), "of tied names the first"
    for name, value in written.items():
        assert torch.equal(value, whole(name))


def test_shards_have_an_index_and_load_like_any(tmp_path):
    from accel_ckpt import load_checkpoint_in_model

    found = worlds.run(save, 2, tmp_path, "dtensor", max_shard_size=60)
    assert len(found[0]) > 2
    assert found[0][-1] == "model.safetensors.index.json"
    model = torch.nn.Module()
    for name in ("a", "b"):
        linear = torch.nn.Linear(*reversed(SHAPES[f"{name}.weight"]), bias=False)
        setattr(model, name, linear)
    report = load_checkpoint_in_model(model, tmp_path, strict=False)
    assert report.missing == ()
    assert torch.equal(model.a.weight.detach(), whole("a.weight"))


def test_files_of_torch_save_keep_ties(tmp_path):
    worlds.run(save, 2, tmp_path, "parts", safe=False)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["tied"], whole("a.weight"))
    assert loaded["tied"].data_ptr() == loaded["a.weight"].data_ptr()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_full_disk_is_an_error_on_all_ranks(tmp_path, room):
    first, second = worlds.run(save, 2, tmp_path, "dtensor", max_shard_size=60, room=room)
    assert first.startswith("CheckpointSaveError")
    assert "what was there before is unchanged" in first
    assert second.startswith("CheckpointSaveError")
    assert "rank 0" in second


def test_a_file_in_the_place_of_the_folder_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "model").write_text("")
    for message in worlds.run(save, 2, tmp_path / "model", "parts"):
        assert message.startswith("CheckpointSaveError")
        assert "is a file" in message
