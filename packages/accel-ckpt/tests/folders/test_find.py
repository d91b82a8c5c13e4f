"""Which checkpoints of a folder are complete, and how old ones are removed."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
)
from accel_ckpt.disk import Disk
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.local import LocalFolder
from accel_ckpt.folders.objects.folder import ObjectFolder
from testkit.disks import FailingDisk, StubbornDisk
from testkit.stepped_states import save, step_of


def test_which_folder_a_place_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("run", Path("run"), f"file://{tmp_path}/run"):
        folder = find_folder(place)
        assert type(folder) is LocalFolder
        assert folder.on_this_machine
        assert folder.absolute == tmp_path / "run"
    folder = find_folder("memory://bucket/run")
    assert type(folder) is ObjectFolder
    assert not folder.on_this_machine
    assert str(folder.path) == str(folder.absolute) == "memory://bucket/run"


def test_t6_only_complete_checkpoints_are_seen_in_the_order_of_their_numbers(tmp_path):
    for number in (9, 10, 2):
        save(tmp_path / f"checkpoint_{number}", number)
    (tmp_path / "checkpoint_11").mkdir()
    (tmp_path / "checkpoint_12").write_text("a file")
    (tmp_path / "checkpoint_x").mkdir()
    broken = save(tmp_path / "checkpoint_13", 13)
    (broken / "model.safetensors").unlink()
    found = [path.name for path in complete_checkpoints(tmp_path)]
    assert found == ["checkpoint_2", "checkpoint_9", "checkpoint_10"]
    assert complete_checkpoints(tmp_path / "nothing") == []


def test_t6_the_old_one_goes_only_after_the_new_one_is_there(tmp_path):
    for number in range(3):
        save(tmp_path / f"checkpoint_{number}", number)
    with pytest.raises(CheckpointSaveError):
        save(tmp_path / "checkpoint_3", 3, FailingDisk("fsync", 2))
    assert len(complete_checkpoints(tmp_path)) == 3
    assert [p.name for p in prune_checkpoints(tmp_path, 2)] == ["checkpoint_0"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]
    assert prune_checkpoints(tmp_path, 2) == []
    with pytest.raises(ValueError, match="keep is 0"):
        prune_checkpoints(tmp_path, 0)


def test_a_checkpoint_that_was_moved_and_linked_loses_its_link_only(tmp_path):
    for number in range(2):
        save(tmp_path / f"checkpoint_{number}", number)
    (tmp_path / "checkpoint_0").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in prune_checkpoints(tmp_path, 1)] == ["checkpoint_0"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "elsewhere"]
    assert step_of(tmp_path / "elsewhere") == 0


def test_a_removal_that_stops_midway_leaves_no_half_checkpoint(tmp_path):
    for number in range(2):
        save(tmp_path / f"checkpoint_{number}", number)

    class Stops(Disk):
        def remove_tree(self, path):
            (path / "model.safetensors").unlink()
            raise OSError("stopped")

    with pytest.warns(UserWarning, match="could not be removed: stopped"):
        assert prune_checkpoints(tmp_path, 1, disk=Stops()) == []
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint_1"]
    with pytest.warns(UserWarning, match="it is removed"):
        save(tmp_path / "checkpoint_2", 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]


def test_a_temporary_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        save(
            tmp_path / "c",
            1,
            before_write=lambda folder: open_training_state(folder),
        )


@pytest.mark.parametrize(
    ("operation", "stays"), [("remove", r"\.checkpoint_0\.saving-"), ("rename", "checkpoint_0 ")]
)
def test_what_cannot_be_removed_stops_neither_other_removals_nor_saves(tmp_path, operation, stays):
    disk = StubbornDisk("checkpoint_0", operation)
    for number in range(3):
        save(tmp_path / f"checkpoint_{number}", number)
    with pytest.warns(UserWarning, match=f"{stays}.*could not be removed.*Operation not permitted"):
        assert [path.name for path in prune_checkpoints(tmp_path, 1, disk=disk)] == ["checkpoint_1"]
    for number in (3, 4):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save(tmp_path / f"checkpoint_{number}", number, disk)
            prune_checkpoints(tmp_path, 1, disk=disk)
        assert all("could not be removed" in str(warning.message) for warning in said)
        assert step_of(tmp_path / f"checkpoint_{number}") == number
    assert len(os.listdir(tmp_path)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tmp_path / "checkpoint_5", 5)  # the trouble is over
        prune_checkpoints(tmp_path, 1)
    assert os.listdir(tmp_path) == ["checkpoint_5"]


def test_what_cannot_be_removed_is_said_once(tmp_path):
    disk = StubbornDisk("checkpoint_0", "remove")
    for number in range(2):
        save(tmp_path / f"checkpoint_{number}", number)
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        prune_checkpoints(tmp_path, 1, disk=disk)
        for number in range(2, 5):
            save(tmp_path / f"checkpoint_{number}", number, disk)
    assert len(said) == 1


def test_checkpoints_of_another_user_do_not_stop_removals_with_an_error(tmp_path, monkeypatch):
    for number in range(3):
        save(tmp_path / f"checkpoint_{number}", number)
    real = Path.read_bytes

    def read(path):
        if path.parent.name == "checkpoint_1":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.warns(
        UserWarning, match="no older checkpoint .* was removed.*Permission denied.*checkpoint_1"
    ):
        assert prune_checkpoints(tmp_path, 1) == []
