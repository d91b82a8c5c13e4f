"""A reader sees the old content or the new one, also when writing fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_state.whole_files import write_whole


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
