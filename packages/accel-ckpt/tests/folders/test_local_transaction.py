"""A checkpoint exists completely or not at all, whatever fails."""

import contextlib
import errno
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from accel_ckpt import (
    CheckpointSaveError,
    CheckpointVersionError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
    save_training_state,
)
from accel_ckpt.disk import Disk
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.format.reader import file_digest
from accel_ckpt.format.writer import FileRecord
from testkit.disks import FailingDisk, PlainDisk, StubbornDisk
from testkit.stepped_states import save, step_of


def attempt(target, disk):
    try:
        save(target, 2, disk)
    except CheckpointSaveError as error:
        return error
    return None


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("operation", ["open_new", "write", "fsync", "mkdir", "rename", "exchange"])
def test_a_failure_of_each_operation_in_turn_leaves_what_was_there(tmp_path, operation, there, exchanges):
    target = tmp_path / "c"
    failures = 0
    for number in range(1, 40):
        if there:
            save(target, 1)
            (target / "notes.txt").write_text("mine")
        disk = FailingDisk(operation, number, exchanges)
        error = attempt(target, disk)
        if error is not None:
            failures += 1
            assert "c failed" in str(error)
            assert "unchanged" in str(error)
            assert isinstance(error.__cause__, OSError)
            assert os.listdir(tmp_path) == (["c"] if there else [])
            if there:
                assert step_of(target) == 1
                assert (target / "notes.txt").read_text() == "mine"
        else:
            assert not disk.failed
            assert step_of(target) == 2
            break
    renames = 0 if exchanges else 2
    expected = {"rename": renames if there else 1, "exchange": int(there and exchanges)}
    assert failures >= expected.get(operation, 1)


def test_a_full_disk_is_said(tmp_path):
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        save(tmp_path / "c", 1, FailingDisk("write", 3, code=errno.ENOSPC))


def test_links_that_fail_become_copies(tmp_path):
    save(tmp_path / "c", 1)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    save(tmp_path / "c", 2, FailingDisk("link", 1, code=errno.EPERM))
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"


def test_the_save_stands_when_the_old_one_cannot_be_removed(tmp_path):
    save(tmp_path / "c", 1)
    with pytest.warns(UserWarning, match="could not be removed"):
        save(tmp_path / "c", 2, FailingDisk("remove_tree", 1))
    assert step_of(tmp_path / "c") == 2
    assert len(os.listdir(tmp_path)) == 2
    with pytest.warns(UserWarning, match="it is removed"):
        save(tmp_path / "c", 3)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("disk", [Disk(), PlainDisk()], ids=["exchange", "two steps"])
def test_other_files_in_the_folder_are_carried_over(tmp_path, disk):
    target = tmp_path / "c"
    (target / "logs" / "deep").mkdir(parents=True)
    (target / "logs" / "deep" / "events").write_text("one")
    (target / "link").symlink_to("logs")
    with open(target / "logs" / "deep" / "events", "a") as log:
        save(target, 1, disk)
        save(target, 2, disk)
        log.write(", two")
    assert (target / "logs" / "deep" / "events").read_text() == "one, two"
    assert (target / "link").is_symlink()
    assert step_of(target) == 2
    assert os.listdir(tmp_path) == ["c"]


def test_t8_nothing_of_the_previous_save_stays(tmp_path):
    big = [{f"w{i}": torch.zeros(1000) for i in range(4)}, {"v": torch.ones(2)}]
    target = save_training_state(
        tmp_path / "c",
        models=big,
        shared={"optimizer_0": {"t": torch.ones(1)}},
        per_rank={},
        max_shard_size=5000,
    )
    assert len(os.listdir(target)) == 10
    save(target, 1)
    assert sorted(os.listdir(target)) == [
        "manifest.json", "model.safetensors", "rank-00000.json", "rank-00000.safetensors", "state.json",
        "state.safetensors",
    ]  # fmt: skip


def test_a_foreign_file_of_the_same_name_is_not_replaced(tmp_path):
    target = tmp_path / "pretrained"
    target.mkdir()
    (target / "model.safetensors").write_text("precious")
    with pytest.raises(CheckpointSaveError, match=r"would replace: model\.safetensors; move them"):
        save(target, 1)
    assert (target / "model.safetensors").read_text() == "precious"
    assert os.listdir(tmp_path) == ["pretrained"]


def test_a_damaged_manifest_stops_the_replacement(tmp_path):
    target = save(tmp_path / "c", 1)
    (target / "manifest.json").write_text("{")
    with pytest.raises(CheckpointSaveError, match="it is unknown which of its files may be replaced"):
        save(target, 2)


def test_bad_destinations(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointSaveError, match="is a file"):
        save(tmp_path / "file", 1)
    with pytest.raises(CheckpointSaveError, match="file"):
        save(tmp_path / "file" / "below", 1)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(CheckpointSaveError, match="current working folder"):
        save(tmp_path / "here", 1)
    assert os.listdir(tmp_path / "here") == ["below"]
    assert save("relative", 1) == tmp_path / "here" / "below" / "relative"


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    save(tmp_path / "real", 1)
    (tmp_path / "latest").symlink_to("real")
    save(tmp_path / "latest", 2)
    assert (tmp_path / "latest").is_symlink()
    assert step_of(tmp_path / "real") == 2


def test_parents_are_made(tmp_path):
    assert step_of(save(tmp_path / "a" / "b" / "c", 1)) == 1


def test_permission_denied(tmp_path):
    class Denied(Disk):
        def mkdir(self, path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(CheckpointSaveError, match="Permission denied"):
        save(tmp_path / "c", 1, Denied())


def test_a_newer_format_is_named(tmp_path):
    target = save(tmp_path / "c", 1)
    text = (target / "manifest.json").read_text()
    (target / "manifest.json").write_text(text.replace('"version": 2', '"version": 3'))
    with pytest.raises(
        CheckpointVersionError, match=r"format version 3.*pip install -r requirements/all.txt"
    ):
        open_training_state(target)


def test_a_manifest_that_names_a_file_outside(tmp_path):
    target = save(tmp_path / "c", 1)
    manifest = Manifest.read(target)
    for name in ("../x", "/etc/hosts"):
        (target / "manifest.json").unlink()
        Manifest(1, (0,), ((name,),), {**manifest.files, name: manifest.files["state.json"]}).write(target)
        with pytest.raises(ValueError, match="not inside its folder"):
            open_training_state(target)


def test_someone_else_s_manifest(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(CorruptCheckpointError, match="not the manifest of a checkpoint"):
        open_training_state(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "accel-checkpoint", "version": 1}')
    with pytest.raises(CorruptCheckpointError, match="its own checksum"):
        open_training_state(tmp_path)


# Pruning and finding


# The swap in two steps


class DiesBetween(PlainDisk):
    """Stops between the two renames of a swap, as a kill would."""

    def rename(self, source, target):
        super().rename(source, target)
        if ".previous-" in Path(target).name:
            raise KeyboardInterrupt


def test_an_interrupted_swap_is_undone_by_whoever_comes_next(tmp_path):
    save(tmp_path / "checkpoint_1", 1)
    for reader in (
        lambda: step_of(tmp_path / "checkpoint_1"),
        lambda: complete_checkpoints(tmp_path),
        lambda: save(tmp_path / "checkpoint_2", 2),
    ):
        with contextlib.suppress(KeyboardInterrupt):
            save(tmp_path / "checkpoint_1", 5, DiesBetween())
        assert not (tmp_path / "checkpoint_1").exists()
        with pytest.warns(UserWarning, match="the previous one is put back"):
            reader()
        assert step_of(tmp_path / "checkpoint_1") == 1


class SomebodyElse(Disk):
    """Another process acts, once, right before a call that gives the checkpoint its name."""

    def __init__(self, act, exchanges, call=1):
        self.act, self.exchanges, self.left = act, exchanges, call

    def _count(self, source):
        if ".saving-" in Path(source).name or not self.exchanges:
            self.left -= 1
            if self.left == 0:
                self.act()

    def rename(self, source, target):
        self._count(source)
        super().rename(source, target)

    def exchange(self, first, second):
        if not self.exchanges:
            return False
        self._count(first)
        return super().exchange(first, second)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_name_that_another_save_takes_first_is_replaced(tmp_path, exchanges):
    target = tmp_path / "c"

    def act():
        save(target, 1)
        (target / "notes.txt").write_text("mine")

    save(target, 2, SomebodyElse(act, exchanges))
    assert step_of(target) == 2
    assert (target / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_that_is_removed_before_it_is_replaced(tmp_path, exchanges):
    target = save(tmp_path / "c", 1)
    (target / "notes.txt").write_text("mine")
    save(target, 2, SomebodyElse(lambda: shutil.rmtree(target), exchanges))
    assert step_of(target) == 2
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.filterwarnings("error")
def test_a_name_that_another_save_takes_between_the_two_renames(tmp_path):
    target = save(tmp_path / "c", 1)
    (target / "notes.txt").write_text("mine")
    save(target, 3, SomebodyElse(lambda: save(target, 2), exchanges=False, call=2))
    assert step_of(target) == 3
    assert (target / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.filterwarnings("error")
def test_two_prunings_of_one_checkpoint(tmp_path):
    for step in range(3):
        save(tmp_path / f"checkpoint_{step}", step)

    class Slower(Disk):
        def rename(self, source, target):
            shutil.rmtree(tmp_path / "checkpoint_0", ignore_errors=True)
            super().rename(source, target)

    assert prune_checkpoints(tmp_path, 1, disk=Slower()) == [tmp_path / "checkpoint_1"]
    assert os.listdir(tmp_path) == ["checkpoint_2"]


def test_no_warnings_in_ordinary_use(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            assert step_of(save(tmp_path / "c", step)) == step


def test_reading_during_a_swap_sees_one_or_the_other(tmp_path):
    target = save(tmp_path / "c", 1)

    class Reads(Disk):
        def exchange(self, first, second):
            assert step_of(target) == 1
            done = super().exchange(first, second)
            assert step_of(target) == 2
            return done

    save(target, 2, Reads())
    assert step_of(target) == 2


def test_a_file_that_appears_during_the_swap_is_kept(tmp_path):
    target = save(tmp_path / "c", 1)

    class Busy(Disk):
        def exchange(self, first, second):
            (target / "late.txt").write_text("late")
            return super().exchange(first, second)

    save(target, 2, Busy())
    assert (target / "late.txt").read_text() == "late"


def test_an_old_folder_that_stays_after_a_swap_does_not_stop_the_next_save(tmp_path):
    disk = StubbornDisk("c", "remove")
    for number in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save(tmp_path / "c", number, disk)
        assert ["could not be removed" in str(warning.message) for warning in said] == [True] * len(said)
        assert step_of(tmp_path / "c") == number


def test_a_manifest_does_not_say_which_files_are_removed(tmp_path):
    target = save(tmp_path / "c", 1)
    for name in ("notes.txt", "data/table.csv"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("precious")
    listed = {name: FileRecord(8, file_digest(target / name)) for name in ("notes.txt", "data/table.csv")}
    manifest = Manifest.read(target)
    (target / "manifest.json").unlink()
    Manifest(1, (0,), manifest.models, {**manifest.files, **listed}).write(target)
    open_training_state(target).verify()
    for step in (2, 3):
        save(target, step)
        assert step_of(target) == step
        assert all((target / name).read_text() == "precious" for name in listed)


def test_a_manifest_is_no_link_out_of_its_folder(tmp_path):
    target, other = save(tmp_path / "c", 1), save(tmp_path / "d", 2)
    (target / "manifest.json").unlink()
    (target / "manifest.json").symlink_to(other / "manifest.json")
    with pytest.raises(UnsafeCheckpointError, match=r"manifest\.json is a link to"):
        open_training_state(target)
    with pytest.raises(CheckpointSaveError, match=r"manifest\.json is a link to"):
        save(target, 3)
    assert step_of(other) == 2
