"""The thread that reads pages."""

from __future__ import annotations

import os
import sys

import pytest

from accel_bigmodel.paging import reading
from accel_bigmodel.paging.pages import extents_of
from accel_ckpt.format.memory import map_file


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_disk_that_does_not_answer_is_left_to_the_forward(tmp_path, monkeypatch):
    """Touching what cannot be read would end the process, perhaps for a group that is not even used."""
    path = tmp_path / "f"
    path.write_bytes(bytes(10 * 4096))
    weight = map_file(path, 10 * 4096)
    os.truncate(path, 4096)
    extent = extents_of([[weight]])[0][0]
    reader = reading.Reader()
    reader.follow({extent: 1})
    reader.wait({extent: 1})
    reader.stop()
