"""Reading from object storage: only what is needed, and nothing that was changed."""

import gc
import json
import os
import pathlib

import pytest
import torch
import xxhash

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointVersionError,
    CorruptCheckpointError,
    ObjectStorageError,
    Part,
    UnsafeCheckpointError,
    complete_checkpoints,
    load_optimizer_state,
    open_training_state,
    optimizer_state_by_name,
    save_training_state,
)
from accel_ckpt.format.writer import BLOCK_HASHED
from testkit.object_storage import Objects

ROWS = 6 * BLOCK_HASHED // 1024  # of 1 KiB: six blocks


@pytest.fixture
def saved(bucket):
    weight = torch.arange(ROWS * 256, dtype=torch.float32).reshape(ROWS, 256)
    save_training_state(
        f"{bucket}/c", models=[{"w": weight, "b": torch.ones(3)}], shared={"x": torch.ones(4)}, per_rank={}
    )
    Objects.read = 0
    return f"{bucket}/c", weight


def file_of(place, name):
    folder = pathlib.Path("/", place.removeprefix("objects://"))
    return folder / json.loads((folder / "manifest.json").read_text())["folder"] / name


def test_only_the_blocks_that_are_needed(saved):
    place, weight = saved
    weights = open_training_state(place).weights(0)
    assert weights.shapes == {"w": (ROWS, 256), "b": (3,)}
    headers = Objects.read
    assert headers < 1.1 * BLOCK_HASHED  # the block that begins with the header, and the manifest
    part = Part(torch.empty(100, 256), offsets=(ROWS // 2, 0), shape=(ROWS, 256))
    weights.fill({"w": part})
    assert torch.equal(part.tensor, weight[ROWS // 2 : ROWS // 2 + 100])
    assert Objects.read - headers <= 2 * BLOCK_HASHED
    before = Objects.read
    weights.fill({"w": part})
    assert Objects.read == before  # they are here


def test_columns(saved):
    place, weight = saved
    part = Part(torch.empty(ROWS, 7), offsets=(0, 5), shape=(ROWS, 256))
    open_training_state(place).weights(0).fill({"w": part})
    assert torch.equal(part.tensor, weight[:, 5:12])


def test_everything_is_read_once(saved):
    place, weight = saved
    assert torch.equal(open_training_state(place).models[0]["w"], weight)
    assert Objects.read < weight.nbytes + BLOCK_HASHED


def test_local_files_go_with_the_checkpoint(saved, tmp_path):
    place, weight = saved
    checkpoint = open_training_state(place)
    views = checkpoint.mapped_model(0)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    del checkpoint
    gc.collect()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert torch.equal(views["w"], weight)


def test_what_killed_processes_left_is_removed(saved, tmp_path):
    place, _ = saved
    left = tmp_path / "tmp" / "accel-checkpoint-0123456789ab@host"
    left.mkdir()
    (left / "model.safetensors").touch()
    (tmp_path / "tmp" / "accel-checkpoint-of-mine").mkdir()
    checkpoint = open_training_state(place)
    assert not left.exists()
    other = open_training_state(place)  # whose first one is alive
    names = {path.name for path in (tmp_path / "tmp").iterdir()}
    assert names == {checkpoint.local_folder().name, other.local_folder().name, "accel-checkpoint-of-mine"}


@pytest.mark.parametrize("lazy", [False, True])
def test_changed_bytes(saved, lazy):
    place, _ = saved
    path = file_of(place, "model.safetensors")
    content = bytearray(path.read_bytes())
    content[4 * BLOCK_HASHED + 17] ^= 1
    path.write_bytes(content)
    checkpoint = open_training_state(place)
    said = rf"{place}/files-.*/model.safetensors is not what was saved from byte {4 * BLOCK_HASHED} on"
    if lazy:
        target = Part(torch.empty(4, 256), offsets=(0, 0), shape=(ROWS, 256))
        checkpoint.weights(0).fill({"w": target})  # in another block
        whole = torch.zeros(ROWS, 256)
        with pytest.raises(CorruptCheckpointError, match=said):
            checkpoint.weights(0).fill({"w": whole})
        assert not whole.any()
    else:
        with pytest.raises(CorruptCheckpointError, match=said):
            checkpoint.mapped_model(0)
    with pytest.raises(CorruptCheckpointError, match=said):
        open_training_state(place).verify()
    open_training_state(place, verify=False).weights(0).fill({"w": torch.zeros(ROWS, 256)})


def test_bytes_that_were_damaged_on_the_way_are_read_again(saved, monkeypatch):
    place, weight = saved
    original, damaged = Objects.cat_file, []

    def damage(self, path, start=None, end=None):
        data = bytearray(original(self, path, start, end))
        if path.endswith("model.safetensors") and start and not damaged:
            damaged.append(start)
            data[0] ^= 1
        return bytes(data)

    monkeypatch.setattr(Objects, "cat_file", damage)
    assert torch.equal(open_training_state(place).models[0]["w"], weight)
    assert damaged


def test_answers_that_are_cut_off(saved, monkeypatch):
    place, weight = saved
    monkeypatch.setattr("accel_ckpt.folders.objects.store._PAUSES", (0.0, 0.0))
    original, cut = Objects.cat_file, []

    def cut_off(self, path, start=None, end=None):
        data = original(self, path, start, end)
        if end is not None and len(cut) < 2:
            cut.append(path)
            return data[:-1]
        return data

    monkeypatch.setattr(Objects, "cat_file", cut_off)
    assert torch.equal(open_training_state(place).models[0]["w"], weight)
    assert len(cut) == 2
    monkeypatch.setattr(
        Objects, "cat_file", lambda self, path, start=None, end=None: original(self, path, start, end)[:-1]
    )
    with pytest.raises((ObjectStorageError, CorruptCheckpointError), match=place):
        _ = open_training_state(place).models[0]


@pytest.mark.parametrize("size", [None, 10])
def test_missing_and_truncated_objects(saved, size):
    place, _ = saved
    path = file_of(place, "model.safetensors")
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    what = "is missing" if size is None else "has 10 bytes"
    with pytest.raises(CorruptCheckpointError, match=rf"{place}/files-.*/model.safetensors {what}"):
        open_training_state(place)
    assert complete_checkpoints(place.rpartition("/")[0], "c") == []


def test_a_checkpoint_that_goes_while_it_is_read(saved):
    place, _ = saved
    checkpoint = open_training_state(place)
    file_of(place, "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"there is no {place}/files-"):
        _ = checkpoint.models[0]


def test_what_is_no_checkpoint(bucket):
    with pytest.raises(CheckpointNotFoundError, match=rf"{bucket}/c holds no manifest\.json"):
        open_training_state(f"{bucket}/c")


def rewrite(place, change):
    """Change a manifest, with a checksum that is right."""
    path = pathlib.Path("/", place.removeprefix("objects://"), "manifest.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["manifest_xxh3"] = "0" * 16
    raw = (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in manifest.items()) + "\n}\n"
    ).encode()
    path.write_bytes(raw.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(raw).encode(), 1))


def renamed(name):
    def change(manifest):
        manifest["files"][name] = manifest["files"].pop("state.json")

    return change


@pytest.mark.parametrize("name", ["../state.json", "/etc/state.json", "a/../../b", "C:\\x", ""])
def test_names_that_leave_the_folder(saved, name, tmp_path):
    place, _ = saved
    rewrite(place, renamed(name))
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        open_training_state(place)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(folder="../other"),
        lambda m: m.update(folder="files-0123456789ab/.."),
        lambda m: m.update(folder=7),
        lambda m: m["files"]["state.json"].update(size=-1),
        lambda m: m["files"]["state.json"].update(size=1e300),
        lambda m: m["files"]["state.json"].update(size=True),
        lambda m: m["files"]["state.json"].update(xxh3=None),
        lambda m: m["blocks"]["xxh3"].update({"state.json": "0" * 64}),
        lambda m: m.update(blocks=[]),
        lambda m: m["files"].update({"state.json/x": {"size": 0, "xxh3": "0" * 16}}),
        lambda m: m["files"].update({"huge": {"size": 1 << 60, "xxh3": "0" * 16}}),
    ],
)
def test_manifests_that_nobody_wrote(saved, change):
    place, _ = saved
    rewrite(place, change)
    with pytest.raises(CorruptCheckpointError, match=place):
        open_training_state(place)


def test_no_room_for_what_is_read(saved, monkeypatch):
    place, _ = saved
    checkpoint = open_training_state(place)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        ObjectStorageError, match=r"cannot be kept in .*No space left.*set TMPDIR to a folder"
    ):
        _ = checkpoint.models[0]


def test_newer_manifests(saved):
    place, _ = saved
    rewrite(place, lambda m: m.update(version=99))
    with pytest.raises(CheckpointVersionError, match=f"{place}/manifest.json is of format version 99"):
        open_training_state(place)
    assert complete_checkpoints(place.rpartition("/")[0], "c") == []


def test_optimizers(bucket):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    states = {"optimizer_0": optimizer_state_by_name(optimizer, [model])}
    save_training_state(f"{bucket}/c", models=[model.state_dict()], shared=states, per_rank={})
    checkpoint = open_training_state(f"{bucket}/c")
    for trees in (checkpoint.lazy_shared(["optimizer_0"]), checkpoint.mapped_shared(["optimizer_0"])):
        other = torch.optim.AdamW(model.parameters())
        load_optimizer_state(other, trees["optimizer_0"], [model])
        for parameter in model.parameters():
            assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
