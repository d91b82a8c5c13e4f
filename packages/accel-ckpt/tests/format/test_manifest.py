"""What a manifest finds missing, also while somebody else removes the checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from accel_ckpt import save_training_state
from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.folders.find import complete_checkpoints, find_folder
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.format.writer import FileRecord


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint_1"
    save_training_state(path, models=[{"w": torch.ones(3)}], shared={"step": 1}, per_rank={"rng": 2})
    assert find_folder(path).is_complete()
    return path


def test_a_file_that_is_gone_or_is_none(checkpoint):
    manifest = Manifest.read(checkpoint)
    name = next(iter(manifest.files))
    (checkpoint / name).unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing, but the manifest"):
        manifest.check_sizes(checkpoint)
    (checkpoint / name).mkdir()
    with pytest.raises(CorruptCheckpointError, match="is missing, but the manifest"):
        manifest.check_sizes(checkpoint)


@pytest.mark.parametrize("looks", range(3))
def test_a_checkpoint_that_goes_between_two_looks_is_no_longer_there(checkpoint, monkeypatch, looks):
    manifest = Manifest.read(checkpoint)
    stat, seen = Path.stat, []

    def removed_meanwhile(path, **more):
        if checkpoint in path.parents:
            seen.append(path)
            if len(seen) > looks:
                shutil.rmtree(checkpoint, ignore_errors=True)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", removed_meanwhile)
    if looks < len(manifest.files):
        with pytest.raises(CheckpointNotFoundError, match="was removed while it was read"):
            manifest.check_sizes(checkpoint)
    seen.clear()
    assert complete_checkpoints(checkpoint.parent, "checkpoint_") == [] or looks >= len(manifest.files)


def test_files_of_a_save_in_a_folder_of_its_own(tmp_path):
    """As in object storage, and after a copy from there."""
    text = b"content"
    record = FileRecord(len(text), xxhash.xxh3_64_hexdigest(text), blocks=(xxhash.xxh3_64_hexdigest(text),))
    manifest = Manifest(1, (0,), (), {"a/b": record}, "files-0123456789ab")
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest == Manifest.decode(manifest.encode(), "text")
    with pytest.raises(CorruptCheckpointError, match="files-0123456789ab/a/b is missing"):
        manifest.check_sizes(tmp_path)
    (tmp_path / "files-0123456789ab/a").mkdir(parents=True)
    (tmp_path / "files-0123456789ab/a/b").write_bytes(text)
    manifest.check_content(tmp_path)


@pytest.mark.parametrize("folder", ["..", "files-0123456789ab/..", "other", 3])
def test_folders_that_no_save_makes(folder):
    raw = Manifest(1, (0,), (), {}, folder).encode()
    with pytest.raises(
        CorruptCheckpointError, match=r"\['folder'\] is .*, where the name of a folder of a save"
    ):
        Manifest.decode(raw, "text")


def changed(**fields):
    """A manifest with the right checksum, in which fields are others."""
    record = FileRecord(1, "0" * 16)
    lines = json.loads(Manifest(1, (0,), (("model.safetensors",),), {"x": record}).encode())
    lines |= {"manifest_xxh3": "0" * 16} | fields
    raw = ("{" + ",".join(f'"{name}": {json.dumps(value)}' for name, value in lines.items()) + "}").encode()
    return raw.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(raw).encode(), 1)


def file(**fields):
    return {"x": {"size": 1, "xxh3": "0" * 16} | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"world_size": 0}, r"\['world_size'\] is 0"),
        ({"world_size": -3}, r"\['world_size'\] is -3"),
        ({"world_size": True}, r"\['world_size'\] is True"),
        ({"world_size": 1.0}, r"\['world_size'\] is 1.0"),
        ({"world_size": 10**30}, r"\['world_size'\] is 1000"),
        ({"ranks": [0, 0]}, "ranks that are none of 1, or twice"),
        ({"ranks": [1]}, "ranks that are none of 1, or twice"),
        ({"ranks": ["a", None]}, r"\['ranks'\]\[0\] is 'a'"),
        ({"ranks": "01"}, r"\['ranks'\] is '01'"),
        ({"models": [None]}, r"\['models'\]\[0\] is None, where a list"),
        ({"models": ["ab"]}, r"\['models'\]\[0\] is 'ab', where a list"),
        ({"files": []}, r"\['files'\] is one list"),
        ({"files": file(xxh3=None)}, r"\['files'\]\['x'\]\['xxh3'\] is None"),
        ({"files": file(xxh3="")}, r"\['xxh3'\] is ''"),
        ({"files": file(size=1.0)}, r"\['size'\] is 1.0"),
        ({"files": file(size=-1)}, r"\['size'\] is -1"),
        ({"files": {"x": 3}}, r"\['x'\] is 3"),
        ({"tensors": []}, r"\['tensors'\] is one list"),
        ({"tensors": {"x": 3}}, r"\['x'\] is 3"),
        ({"blocks": []}, r"\['blocks'\] is one list"),
        ({"blocks": {"size": 1 << 22, "xxh3": {"x": "0" * 17}}}, r"\['blocks'\]|text"),
    ],
)  # fmt: skip
def test_every_field_is_checked(fields, message):
    Manifest.decode(changed(), "text")
    with pytest.raises(CorruptCheckpointError, match=message):
        Manifest.decode(changed(**fields), "text")


def test_a_folder_that_is_a_link_to_outside_is_refused(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "files-0123456789ab").symlink_to("../outside")
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint's folder"):
        Manifest(1, (0,), (), {}, "files-0123456789ab").home(tmp_path / "state")


def test_the_format_in_which_it_was_read_is_known():
    about = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    old = {
        "format": "accel-checkpoint", "version": 1, "manifest_xxh3": "0" * 16, "world_size": 1, "ranks": [0],
        "models": [["m.safetensors"]], "files": {"m.safetensors": {"size": 100, "xxh3": "1" * 16}},
        "tensors": {"m.safetensors": about},
    }  # fmt: skip
    raw = json.dumps(old).encode()
    manifest = Manifest.decode(raw.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(raw).encode(), 1), "old")
    assert manifest.version == 1
    assert manifest.files["m.safetensors"].header == 96
    assert Manifest.decode(manifest.encode(), "new").version == 2
