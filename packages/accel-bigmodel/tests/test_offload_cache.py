"""Weights in cache files: written once, whole or not at all, and never taken for what they are not."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading

import pytest
import safetensors.torch
import torch

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.offload_cache import OffloadCache
from accel_ckpt.disk import Disk
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.format.memory import mapped_file_of


def some(seed=0):
    torch.manual_seed(seed)
    return {
        "a": torch.randn(5, 3),
        "b": torch.randn(4).bfloat16(),
        "c": torch.arange(7),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
        "across": torch.randn(3, 4).t(),
    }


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in expected
    )


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_values_come_back_as_views_that_never_write_to_the_file(tmp_path):
    weights = some()
    found = OffloadCache(tmp_path / "new" / "folder").keep(weights)
    assert equal(found, weights)
    [path] = (tmp_path / "new" / "folder").iterdir()
    before = path.read_bytes()
    assert mapped_file_of(found["a"]).path == path
    found["a"].zero_()
    assert path.read_bytes() == before
    assert equal(safetensors.torch.load_file(path), weights)


def test_a_file_is_written_once(tmp_path):
    cache = OffloadCache(tmp_path)
    cache.keep(some())
    [path] = tmp_path.iterdir()
    before = path.stat()
    assert equal(OffloadCache(tmp_path).keep(some()), some())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files(tmp_path) == [path.name]


def test_t10_weights_of_another_model_are_never_served(tmp_path):
    cache = OffloadCache(tmp_path)
    first, second = some(0), some(1)
    cache.keep(first)
    assert equal(cache.keep(second), second)
    assert equal(cache.keep(first), first)
    renamed = {f"x.{name}": tensor for name, tensor in first.items()}
    assert equal(cache.keep(renamed), renamed)
    shaped = first | {"a": first["a"].view(3, 5)}
    assert equal(cache.keep(shaped), shaped)
    assert len(files(tmp_path)) == 4


def test_the_key_tells_files_of_equal_names_and_shapes_apart(tmp_path):
    cache = OffloadCache(tmp_path)
    about = {"a": ((2,), torch.float32)}
    for value, key in enumerate(("one", "two")):
        file = cache.open(key, about)
        assert not file.is_there
        with file:
            file.put("a", torch.full((2,), float(value)))
    assert cache.open("one", about).tensors()["a"].tolist() == [0, 0]
    assert cache.open("two", about).tensors()["a"].tolist() == [1, 1]


def test_t11_files_of_accelerate_are_ignored_and_kept(tmp_path):
    from accel_bigmodel import offload_state_dict  # which writes the same files

    weights = some()
    wrong = {"a": torch.zeros(5, 3)}
    offload_state_dict(tmp_path, wrong)
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"index.json", "a.dat"} <= there.keys()
    assert equal(OffloadCache(tmp_path).keep(weights), weights)
    assert all((tmp_path / name).read_bytes() == content for name, content in there.items())


@pytest.mark.parametrize("damage", ["short", "long", "header", "empty", "foreign", "other shape"])
def test_a_file_that_is_not_what_it_should_be_is_written_anew(tmp_path, damage):
    weights = some()
    cache = OffloadCache(tmp_path)
    cache.keep(weights)
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    os.unlink(path)
    if damage == "foreign":
        safetensors.torch.save_file({n: torch.zeros_like(t).contiguous() for n, t in weights.items()}, path)
    elif damage == "other shape":
        metadata = {"format": "pt", "accel_offload": path.stem.removeprefix("offload-")}
        safetensors.torch.save_file({"a": torch.zeros(3)}, path, metadata)
    else:
        changed = {
            "short": content[:-1], "long": content + b"0", "empty": b"",
            "header": content[:9] + b"#" + content[10:],
        }  # fmt: skip
        path.write_bytes(changed[damage])
    assert equal(cache.keep(weights), weights)
    assert path.read_bytes() == content


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path):
    about = {"a": ((2,), torch.float32), "b": ((2,), torch.float32)}

    def interrupted():
        with OffloadCache(tmp_path).open("k", about) as file:
            file.put("a", torch.ones(2))
            [part] = tmp_path.iterdir()
            assert part.stat().st_size == file.size  # taken from the start
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(tmp_path) == []
    assert not OffloadCache(tmp_path).open("k", about).is_there


class Full(Disk):
    def __init__(self, call, after=0):
        self.call, self.left = call, after

    def _fail(self, call):
        if call == self.call:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_new(self, path):
        self._fail("open_new")
        return super().open_new(path)

    def reserve(self, descriptor, size):
        self._fail("reserve")
        super().reserve(descriptor, size)

    def write(self, descriptor, data):
        self._fail("write")
        return super().write(descriptor, data[:50])  # a write need not take everything

    def fsync(self, descriptor):
        self._fail("fsync")
        super().fsync(descriptor)

    def rename(self, source, target):
        self._fail("rename")
        super().rename(source, target)


@pytest.mark.parametrize(
    ("call", "after"),
    [("open_new", 0), ("reserve", 0), ("write", 0), ("write", 4), ("fsync", 0), ("rename", 0)],
)
def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path, call, after):
    with pytest.raises(OffloadError, match=rf"{tmp_path}: .*No space left.*free some space"):
        OffloadCache(tmp_path, Full(call, after)).keep(some())
    assert files(tmp_path) == []
    assert equal(OffloadCache(tmp_path, Full("never")).keep(some()), some())


def test_too_little_space_is_known_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(OffloadError, match=r"100 bytes free.*take \d+.*larger disk"):
        OffloadCache(tmp_path).keep(some())
    assert files(tmp_path) == []


def test_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("mine")
    for folder in (path, path / "below"):
        with pytest.raises(OffloadError, match="a file of that name exists; choose another folder"):
            OffloadCache(folder).keep(some())
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="no such permissions there")
def test_a_folder_that_cannot_be_written():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        me = os.geteuid()
        if me == 0:  # who may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(OffloadError, match=r"ermission denied.*choose another"):
                OffloadCache(folder).keep(some())
            with pytest.raises(OffloadError, match=r"ermission denied.*choose another"):
                OffloadCache(folder + "/below").keep(some())
        finally:
            os.seteuid(me)
        assert os.listdir(folder) == []


def test_tensors_without_values_are_refused(tmp_path):
    with pytest.raises(UnsupportedValueError, match=r"'m'.*meta"):
        OffloadCache(tmp_path).keep({"m": torch.empty(2, device="meta")})


def test_concurrent_writers_agree(tmp_path):
    weights = some()
    found = []

    def work():
        found.append(OffloadCache(tmp_path, Full("never")).keep(weights))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(equal(views, weights) for views in found)
    assert len(files(tmp_path)) == 1


def test_parts_of_killed_writers_go_when_nobody_writes_to_them(tmp_path):
    cache = OffloadCache(tmp_path)
    cache.keep(some())
    [path] = tmp_path.iterdir()
    old, young = (tmp_path / f".{path.name}.part-{letter * 12}" for letter in "ab")
    for part in (old, young, tmp_path / ".other.part-cccccccccccc"):
        part.write_text("")
        os.utime(part, (1, 1))
    os.utime(young)
    cache.keep(some(1))
    assert not old.exists()
    assert young.exists()
    assert (tmp_path / ".other.part-cccccccccccc").exists()


@pytest.mark.wide
def test_memory_stays_at_one_tensor(tmp_path):
    code = f"""
import json, resource, torch
from accel_bigmodel.offload_cache import OffloadCache
torch.ones(1)
about = {{str(i): ((1 << 21,), torch.float32) for i in range(24)}}  # 24 times 8 MB
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
with OffloadCache({str(tmp_path)!r}).open("k", about) as file:
    for name in about:
        file.put(name, torch.full((1 << 21,), float(name)))
print(json.dumps([peak() - before, float(file.tensors()["7"][-1])]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, value = json.loads(done.stdout)
    assert value == 7
    assert grown < 64e6  # of 200
