"""A reader sees the old content or the new one, also when writing fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state import whole_files
from accel_state.whole_files import read_whole, write_whole


def test_a_text_replaces_another(tmp_path):
    path = tmp_path / "a.json"
    for text in ("one\r\n", "zwölf\n"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "one")

    def fail(self, target):
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_whole(path, "two")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_is_read_as_a_whole(tmp_path):
    file = tmp_path / "f"
    for text in (b"", b"a\r\n", b"x" * 3_000_000):
        file.write_bytes(text)
        assert read_whole(file) == text
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_whole(file, 100)
    with pytest.raises(IsADirectoryError):
        read_whole(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none")


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_what_never_ends_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_files, "_PATIENCE", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"does not end within 0\.2 s"):
        read_whole(pipe)
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, b"some")
    with pytest.raises(OSError, match="does not end"):
        read_whole(pipe)
    os.close(writer)
    for device in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(OSError, match="more than 1,000 bytes"):
            read_whole(Path(device), 1_000)


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_the_pipe_of_a_command_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; printf one > {pipe}; sleep 1"]):
        assert read_whole(pipe) == b"one"
