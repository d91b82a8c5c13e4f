"""A checkpoint exists completely or not at all, whatever fails."""

import contextlib
import errno
import os
import warnings
from pathlib import Path

import pytest
import torch

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointVersionError,
    CorruptCheckpointError,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
    save_training_state,
)
from accel_ckpt.disk import Disk
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.saving.commit import Contribution
from accel_ckpt.saving.writer import FileRecord


def save(path, step, disk=None, **options):
    return save_training_state(
        path,
        models=[{"w": torch.full((50,), float(step))}],
        shared={"step": step, "t": torch.tensor([step])},
        per_rank={"rng": torch.tensor([step])},
        **({"disk": disk} if disk else {}),
        **options,
    )


def step_of(path):
    checkpoint = open_training_state(path)
    checkpoint.verify()
    step = checkpoint.shared["step"]
    assert torch.equal(checkpoint.models[0]["w"], torch.full((50,), float(step)))
    assert checkpoint.per_rank(0)["rng"].item() == step
    return step


class FailingDisk(Disk):
    """Fails at the n-th call of one operation."""

    def __init__(self, operation, number, exchanges=True, code=errno.EIO):
        self.operation, self.left, self.exchanges, self.code = operation, number, exchanges, code
        self.failed = False

    def _count(self, operation):
        if operation == self.operation:
            self.left -= 1
            if self.left == 0:
                self.failed = True
                raise OSError(self.code, os.strerror(self.code), operation)

    def open_new(self, path):
        self._count("open_new")
        return super().open_new(path)

    def write(self, descriptor, data):
        self._count("write")
        return super().write(descriptor, data)

    def fsync(self, descriptor):
        self._count("fsync")
        super().fsync(descriptor)

    def mkdir(self, path):
        self._count("mkdir")
        super().mkdir(path)

    def rename(self, source, target):
        self._count("rename")
        super().rename(source, target)

    def link(self, source, target):
        self._count("link")
        super().link(source, target)

    def remove_tree(self, path):
        self._count("remove_tree")
        super().remove_tree(path)

    def exchange(self, first, second):
        if not self.exchanges:
            return False
        self._count("exchange")
        return super().exchange(first, second)


class PlainDisk(Disk):
    """A file system that cannot exchange names."""

    def exchange(self, first, second):
        return False


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
    (target / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointVersionError, match=r"format version 2.*pip install --upgrade accel-ckpt"):
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


def test_a_temporary_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        save(
            tmp_path / "c",
            1,
            before_write=lambda folder: open_training_state(folder),
        )


class Stubborn(Disk):
    """Cannot remove, or not even rename, folders of one checkpoint."""

    def __init__(self, name, operation):
        self.name, self.operation = name, operation

    def _refuse(self, operation, path):
        if self.operation == operation and f"{self.name}." in f"{path.name}.":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    def remove_tree(self, path):
        self._refuse("remove", path)
        super().remove_tree(path)

    def rename(self, source, target):
        self._refuse("rename", source)
        super().rename(source, target)


@pytest.mark.parametrize(
    ("operation", "stays"), [("remove", r"\.checkpoint_0\.saving-"), ("rename", "checkpoint_0 ")]
)
def test_what_cannot_be_removed_stops_neither_other_removals_nor_saves(tmp_path, operation, stays):
    disk = Stubborn("checkpoint_0", operation)
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
    disk = Stubborn("checkpoint_0", "remove")
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


def test_an_old_folder_that_stays_after_a_swap_does_not_stop_the_next_save(tmp_path):
    disk = Stubborn("c", "remove")
    for number in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save(tmp_path / "c", number, disk)
        assert ["could not be removed" in str(warning.message) for warning in said] == [True] * len(said)
        assert step_of(tmp_path / "c") == number


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"files": {}},
        {"files": {"x": 1}, "models": []},
        {"files": {"x": {"size": -1, "xxh3": "0" * 16, "tensors": {}, "blocks": []}}, "models": []},
        {"files": {"x": {"size": 1, "xxh3": None, "tensors": {}, "blocks": []}}, "models": []},
        {"files": {}, "models": ["x"]},
    ],
)
def test_what_a_rank_says_that_it_wrote_is_checked(data):
    with pytest.raises(CorruptCheckpointError, match="what a rank says that it wrote"):
        Contribution.from_plain(data)


def test_a_contribution_comes_back():
    record = FileRecord(
        3, "0" * 16, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, ("1" * 16,)
    )
    mine = Contribution({"x": record}, (("x",), ()))
    assert Contribution.from_plain(mine.to_plain()) == mine
