"""Temporary folders are removed when, and only when, their save is dead."""

import os
import subprocess
import sys
import threading
import time
import warnings

import pytest

from accel_ckpt.disk import Disk
from accel_ckpt.folders import leftovers
from accel_ckpt.folders.leftovers import (
    TemporaryFolder,
    clean_leftovers,
    host_token,
    restore_interrupted_swaps,
    temporary_name,
    unfinished,
)

TOKEN = "0123456789ab"

needs_locks = pytest.mark.skipif(leftovers.fcntl is None, reason="folders cannot be locked here")


def leftover(tmp_path, host=None, kind="saving"):
    token = host_token(TOKEN) if host is None else f"{TOKEN}@{host}"
    path = tmp_path / f".checkpoint_1.{kind}-{token}"
    path.mkdir()
    (path / "model.safetensors").write_text("half")
    return path


def test_a_dead_save_s_folder_is_reported_and_removed(tmp_path):
    path = leftover(tmp_path)
    with pytest.warns(UserWarning, match=str(path)):
        assert clean_leftovers(tmp_path, time.time()) == [path]
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_is_removed_without_a_word(tmp_path):
    """It may be a living save's that was made this moment and is not locked yet; that save makes it again."""
    path = temporary_name(tmp_path / "c", host_token(TOKEN))
    path.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clean_leftovers(tmp_path, time.time()) == [path]
    assert not os.listdir(tmp_path)


def test_a_living_save_s_folder_stays(tmp_path):
    folder = TemporaryFolder(temporary_name(tmp_path / "c", host_token(TOKEN)))
    assert clean_leftovers(tmp_path, time.time()) == []
    (folder.path / "model.safetensors").write_text("half")
    folder.release()
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, time.time()) == [folder.path]


@needs_locks
def test_what_is_unfinished_is_listed_and_stays(tmp_path):
    dead, (alive, elsewhere) = leftover(tmp_path), (tmp_path / "c", leftover(tmp_path, host="elsewhere"))
    folder = TemporaryFolder(temporary_name(alive, host_token(TOKEN)))
    (tmp_path / "checkpoint_2").mkdir()
    before = sorted(os.listdir(tmp_path))
    assert unfinished(tmp_path) == {dead.name: True, folder.path.name: False, elsewhere.name: False}
    assert sorted(os.listdir(tmp_path)) == before
    folder.release()
    assert unfinished(tmp_path)[folder.path.name]


def test_the_lock_dies_with_its_process(tmp_path):
    path = temporary_name(tmp_path / "c", host_token(TOKEN))
    code = (
        "import sys, pathlib; from accel_ckpt.folders.leftovers import TemporaryFolder;"
        "f = TemporaryFolder(pathlib.Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=environ,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert clean_leftovers(tmp_path, time.time()) == []
        process.kill()
    (path / "model.safetensors").write_text("half")
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, time.time()) == [path]


def test_another_machine_s_folder_stays_for_a_day(tmp_path):
    path = leftover(tmp_path, host="elsewhere")
    now = path.stat().st_mtime
    assert clean_leftovers(tmp_path, now + 3600) == []
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, now + 25 * 3600) == [path]


def test_other_folders_and_files_stay(tmp_path):
    (tmp_path / ".checkpoint_1.saving-notours").mkdir()
    (tmp_path / f".x.saving-{host_token(TOKEN)}").write_text("a file")
    (tmp_path / "checkpoint_1").mkdir()
    assert clean_leftovers(tmp_path, time.time()) == []
    assert len(os.listdir(tmp_path)) == 3


def test_without_locks_age_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "fcntl", None)  # as on Windows
    folder = TemporaryFolder(temporary_name(tmp_path / "c", host_token(TOKEN)))
    now = folder.path.stat().st_mtime
    assert clean_leftovers(tmp_path, now) == []
    (folder.path / "model.safetensors").write_text("half")
    folder.release()
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, now + 25 * 3600) == [folder.path]


def test_a_previous_folder_without_its_successor_is_not_removed(tmp_path):
    path = leftover(tmp_path, kind="previous")
    assert clean_leftovers(tmp_path, time.time()) == []
    (tmp_path / "checkpoint_1").mkdir()
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, time.time()) == [path]


def test_a_name_with_special_characters(tmp_path):
    path = temporary_name(tmp_path / "run [1]*.x", host_token(TOKEN))
    path.mkdir()
    (path / "model.safetensors").write_text("half")
    with pytest.warns(UserWarning, match="it is removed"):
        assert clean_leftovers(tmp_path, time.time()) == [path]


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    folder = TemporaryFolder(tmp_path / ".c.saving-0123456789ab@x")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    folder.release()
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        assert leftovers._try_lock(descriptor)
    finally:
        os.close(descriptor)
        os.write(writer, b"x")
        os.waitpid(child, 0)


@needs_locks
def test_a_save_that_finishes_while_it_is_looked_at_is_no_leftover(tmp_path, monkeypatch):
    final = tmp_path / "c"
    folder = TemporaryFolder(temporary_name(final, host_token(TOKEN)))
    try_lock = leftovers._try_lock

    def after_it_has_finished(descriptor):
        if not final.exists():
            os.rename(folder.path, final)
            folder.release()
        return try_lock(descriptor)

    monkeypatch.setattr(leftovers, "_try_lock", after_it_has_finished)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clean_leftovers(tmp_path, time.time()) == []
    assert final.is_dir()


@needs_locks
def test_a_folder_that_is_cleaned_before_it_is_locked_is_made_again(tmp_path):
    import fcntl

    class CleanedAtOnce(Disk):
        """Another save finds the new folder before its owner has locked it."""

        left = 1

        def mkdir(self, path):
            super().mkdir(path)
            if self.left:
                self.left -= 1
                descriptor = os.open(path, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                threading.Timer(0.05, lambda: (path.rmdir(), os.close(descriptor))).start()

    folder = TemporaryFolder(temporary_name(tmp_path / "c", host_token(TOKEN)), CleanedAtOnce())
    assert folder.path.is_dir()
    assert clean_leftovers(tmp_path, time.time()) == []  # it is locked
    folder.release()


@needs_locks
def test_whether_anybody_holds_a_folder(tmp_path):
    held = TemporaryFolder(tmp_path / "held")
    assert not leftovers.is_abandoned(tmp_path / "held")
    held.release()
    assert leftovers.is_abandoned(tmp_path / "held")


def test_a_previous_checkpoint_that_cannot_be_put_back_is_named_and_stays(tmp_path):
    path = leftover(tmp_path, kind="previous")

    class ReadOnly(Disk):
        def rename(self, source, target):
            raise OSError(30, "Read-only file system")

    with pytest.warns(UserWarning, match=f"could not be put back.*Read-only file system.*complete in {path}"):
        restore_interrupted_swaps(tmp_path, ReadOnly())
    assert path.is_dir()


def test_a_folder_that_may_not_be_opened_is_left_alone(tmp_path, monkeypatch):
    path = leftover(tmp_path)
    real = os.open

    def refuse(name, *rest):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(name, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert clean_leftovers(tmp_path, time.time()) == []
