"""Pickles that are damaged, or would fill the memory."""

import pickle
import struct

import pytest

from accel_ckpt import CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.foreign.pickles import read_plain


def test_a_few_bytes_do_not_fill_the_memory(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "x.pkl"
    path.write_bytes(
        b"\x80\x02N" + b"r" + struct.pack("<I", 40_000_000) + b"."
    )  # remember it as number 40,000,000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_plain(path, lambda module, name: None) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x05\x96" + b"\xff" * 6 + b"\x00\x00.",
        b"\x80\x02}r",
    ],
    ids=["empty", "bytearray", "truncated"],
)
def test_damaged_pickles_name_the_file(tmp_path, content):
    path = tmp_path / "x.pkl"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"x\.pkl cannot be read"):
        read_plain(path, lambda module, name: None)


def test_an_object_without_a_stand_in_is_not_built(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(struct.pack))
    with pytest.raises(UnsafeCheckpointError, match=r"it refers to _struct\.pack"):
        read_plain(path, lambda module, name: None)
