"""What a manifest finds missing, also while somebody else removes the checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from accel_ckpt import save_training_state
from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.saving.commit import complete_checkpoints, is_complete
from accel_ckpt.saving.writer import FileRecord


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint_1"
    save_training_state(path, models=[{"w": torch.ones(3)}], shared={"step": 1}, per_rank={"rng": 2})
    assert is_complete(path)
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
    with pytest.raises(CorruptCheckpointError, match="is no folder of a save"):
        Manifest.decode(raw, "text")
