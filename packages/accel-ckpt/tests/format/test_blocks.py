"""Large files are written block by block, past the page cache where that is possible."""

import errno
import mmap
import os

import pytest
import torch
import xxhash

from accel_ckpt.disk import Disk
from accel_ckpt.format import blocks
from accel_ckpt.format.writer import FileWriter, write_safetensors

BLOCK = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)
    monkeypatch.setattr(blocks, "_PIECE", BLOCK // 4)


def content(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()


def write(path, parts, disk):
    with FileWriter(path, disk) as file:
        for part in parts:
            assert file.write(part) == len(part)
        return file.finish()


class Recording(Disk):
    """Keeps the sizes of writes, and how they were made."""

    def __init__(self):
        self.direct = False
        self.writes = []

    def set_direct(self, descriptor, direct):
        self.direct = super().set_direct(descriptor, direct)
        return self.direct

    def write(self, descriptor, data):
        self.writes.append((len(data), self.direct))
        return super().write(descriptor, data)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 4097])
@pytest.mark.parametrize("part", [1000, BLOCK, 10 * BLOCK])
def test_what_is_written_is_what_was_given(tmp_path, size, part):
    data = content(size)
    disk = Recording()
    record = write(tmp_path / "f", [data[i : i + part] for i in range(0, size, part)], disk)
    assert (tmp_path / "f").read_bytes() == data
    assert (record.size, record.xxh3) == (size, xxhash.xxh3_64_hexdigest(data))
    assert [count for count, _ in disk.writes] == [BLOCK] * (size // BLOCK) + [size % BLOCK] * bool(
        size % BLOCK
    )
    assert not (disk.writes and disk.writes[-1][1] and size % BLOCK)  # the end is no multiple of a sector


def test_what_was_given_may_be_changed_afterwards(tmp_path):
    data = bytearray(content(4 * BLOCK))
    before = bytes(data)
    with FileWriter(tmp_path / "f") as file:
        file.write(data)
        data[:] = bytes(len(data))
        file.finish()
    assert (tmp_path / "f").read_bytes() == before


def test_aligned_blocks_are_not_copied(tmp_path, monkeypatch):
    def copyto(target, source):
        raise AssertionError("copied")

    area = mmap.mmap(-1, 2 * BLOCK)
    area.write(content(2 * BLOCK))
    disk = Recording()
    monkeypatch.setattr(blocks.np, "copyto", copyto)
    with FileWriter(tmp_path / "f", disk) as file:
        file.write_block(memoryview(area)[:BLOCK])
        file.write_block(memoryview(area)[BLOCK:])
        record = file.finish()
    assert (tmp_path / "f").read_bytes() == area[:]
    assert (record.size, record.xxh3) == (2 * BLOCK, xxhash.xxh3_64_hexdigest(area[:]))
    assert [count for count, _ in disk.writes] == [BLOCK, BLOCK]


def test_a_block_after_bytes_that_wait_for_more(tmp_path):
    with FileWriter(tmp_path / "f") as file:
        file.write(b"abc")
        with pytest.raises(ValueError, match="3 bytes are waiting"):
            file.write_block(memoryview(bytes(BLOCK)))


class Refusing(Recording):
    """A file system that takes the flag, and refuses the write."""

    def write(self, descriptor, data):
        if self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(descriptor, data)


class Without(Recording):
    """A file system that does not know the flag."""

    def set_direct(self, descriptor, direct):
        return False


class Short(Recording):
    """Takes some bytes at a time, which leaves the rest unaligned."""

    def write(self, descriptor, data):
        return super().write(descriptor, data[: max(1, len(data) // 3)])


@pytest.mark.parametrize("disk", [Refusing, Without, Short])
def test_file_systems_that_cannot(tmp_path, disk):
    data = content(3 * BLOCK + 5)
    record = write(tmp_path / "f", [data], disk())
    assert (tmp_path / "f").read_bytes() == data
    assert record.xxh3 == xxhash.xxh3_64_hexdigest(data)


class Full(Disk):
    """Full after some writes."""

    def __init__(self, after):
        self.after = after

    def write(self, descriptor, data):
        self.after -= 1
        if self.after < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


@pytest.mark.parametrize("after", range(5))
def test_errors_of_the_writing_thread_are_raised(tmp_path, after):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", [content(4 * BLOCK + 1)], Full(after))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_new_threads(tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("threading.Thread.start", start)
    data = content(3 * BLOCK)
    write(tmp_path / "f", [data], Disk())
    assert (tmp_path / "f").read_bytes() == data


def test_tensors_larger_than_a_block(tmp_path):
    from safetensors.torch import load_file

    tensors = {"large": torch.randn(5 * BLOCK), "small": torch.arange(3), "view": torch.randn(300, 200).t()}
    write_safetensors(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
