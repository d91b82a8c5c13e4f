"""Host memory: its alignment, its use again, and images of files in it."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import xxhash

from accel_ckpt.disk import Disk
from accel_ckpt.errors import FileChangedError
from accel_ckpt.format import memory
from accel_ckpt.format.memory import (
    Arena,
    FileImage,
    HostBuffers,
    collector_paused,
    evict,
    map_file,
    mapped_file_of,
    new_bytes,
    populate,
    trim_heap,
)
from accel_ckpt.format.writer import write_image
from accel_ckpt.tensor_storage import as_bytes

BLOCK = 1 << 15


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", BLOCK)


@pytest.fixture
def one_cpu():
    """The test stays on one CPU: Linux keeps the newest pages in lists of each CPU, and reclaims only from its own."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 1 << 22, (1 << 22) + 1])
def test_new_memory_begins_at_a_page(nbytes):
    found = new_bytes(nbytes)
    assert (found.nbytes, found.dtype, found.data_ptr() % mmap.PAGESIZE) == (nbytes, torch.uint8, 0)
    found.fill_(3)
    assert (found == 3).all()


SHAPES = [(), (0,), (3, 0), (5,), (1024, 1025), (1 << 24,), (7,), (1 << 23,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_tensors_of_an_arena_are_apart(dtype):
    arena = Arena()
    found = [arena.empty(shape, dtype).fill_(number % 2) for number, shape in enumerate(SHAPES)]
    for number, (tensor, shape) in enumerate(zip(found, SHAPES, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number % 2).all()


def test_a_tensor_outlives_its_arena():
    kept = Arena().copy(torch.arange(1000).t())
    gc.collect()
    assert torch.equal(kept, torch.arange(1000))


def test_a_mapped_file_is_read_and_never_written(tmp_path):
    path = tmp_path / "f"
    data = bytes(range(256)) * 100
    path.write_bytes(data)
    mapped = map_file(path, len(data))
    if sys.platform == "linux":
        assert populate(mapped)
        assert populate(mapped[4096:9000])
    assert as_bytes(mapped) == data
    mapped.zero_()
    assert path.read_bytes() == data
    with pytest.raises(ValueError, match="greater than file size"):
        map_file(path, len(data) + 1)


@pytest.mark.wide(but=["map_file*"])
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of other systems differ")
@pytest.mark.parametrize("what", ["map_file(path, size)", "new_bytes(size)"])
def test_a_limit_of_addresses_is_explained(tmp_path, what):
    """The usual first try to run a model that does not fit: `ulimit -v`."""
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        file.truncate(1 << 33)
    script = f"""
import resource, torch
from pathlib import Path
from accel_ckpt.format.memory import map_file, new_bytes
path, size = Path({str(path)!r}), 1 << 33
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
{what}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "Cannot allocate memory for 8,589,934,592 bytes of" in done.stderr
    assert "ulimit -v" in done.stderr
    assert (str(path) in done.stderr.splitlines()[-1]) == what.startswith("map")


def test_what_cannot_be_read_ahead_is_said(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(10 * 4096))
    mapped = map_file(path, 10 * 4096)
    os.truncate(path, 4096)  # touching it would end the process
    assert not populate(mapped)
    assert populate(mapped[:4096])


def pages_in_memory(mapped):
    """Whether each page is, as the kernel says."""
    answer = (ctypes.c_ubyte * -(-mapped.numel() // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.numel()), answer) == 0
    return [bool(byte & 1) for byte in answer]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_pages_go_but_for_those_that_were_written_to(tmp_path, one_cpu):
    path = tmp_path / "f"
    size = 64 * mmap.PAGESIZE
    with open(path, "wb") as file:
        file.write(b"a" * size)
        os.fsync(file.fileno())  # what is not on the disk yet cannot go
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = map_file(path, size)
    mapped[5 * mmap.PAGESIZE] = 7
    populate(mapped)
    assert all(pages_in_memory(mapped))
    assert evict(mapped)
    assert [n for n, present in enumerate(pages_in_memory(mapped)) if present] == [5]
    assert mapped[5 * mmap.PAGESIZE] == 7
    mapped[5 * mmap.PAGESIZE] = ord("a")
    assert as_bytes(mapped) == b"a" * size


def test_pages_stay_where_the_kernel_has_no_call_for_it(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(bytes(mmap.PAGESIZE))
    mapped = map_file(path, mmap.PAGESIZE)
    for call in (None, lambda *arguments: -1):
        monkeypatch.setattr(memory, "_madvise", lambda call=call: call)
        assert not evict(mapped)
        assert not populate(mapped)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_memory_of_its_own():
    bytes_, tensor = new_bytes(1 << 16).zero_(), Arena().empty((100,), torch.float32).zero_()
    child = os.fork()
    if not child:  # without torch's threads, which it lacks
        as_bytes(bytes_)[:] = b"x" * bytes_.nbytes
        as_bytes(tensor)[:] = b"x" * tensor.nbytes
        os._exit(0)
    os.waitpid(child, 0)
    assert not bytes_.any()
    assert not tensor.any()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused() as resume:
            assert not gc.isenabled()
            resume()
            assert gc.isenabled() == enabled
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), collector_paused():
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_memory_that_was_given_back_is_taken_again():
    buffers = HostBuffers()
    first = buffers.take(5000, False)
    assert first.nbytes >= 5000
    buffers.give_back(first, False)
    again = buffers.take(6000, False)  # a file that has grown a little
    assert again.data_ptr() == first.data_ptr()
    assert buffers.take(6000, False).data_ptr() != first.data_ptr()
    buffers.give_back(again, False)
    buffers.clear()
    assert buffers._free == {}


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 4097])
def test_an_image_becomes_its_file(tmp_path, small_blocks, size):
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    data = content.numpy().tobytes()
    image = FileImage(size, HostBuffers(), pinned=False)
    image.fill(0, data[:1000])
    at = min(size, 1000)
    for span in image.spans(at, size):
        span.copy_(content[at : at + len(span)])
        at += len(span)
    assert at == size

    class Recording(Disk):
        def write(self, descriptor, data):
            sizes.append(len(data))
            return super().write(descriptor, data)

    sizes = []
    record = write_image(tmp_path / "f", image, Recording())
    assert (tmp_path / "f").read_bytes() == data
    assert (record.size, record.xxh3) == (size, xxhash.xxh3_64_hexdigest(data))
    assert sizes == [BLOCK] * (size // BLOCK) + [size % BLOCK] * bool(size % BLOCK)
    image.release()
    assert list(image.spans(0, 0)) == []


def test_a_mapped_file_is_known_by_the_address_of_its_views(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 100)
    view = map_file(path, 25_000)[100:200].view(torch.int16)
    mapping = mapped_file_of(view)
    assert (mapping.path, len(mapping)) == (path, 25_000)
    assert mapped_file_of(view.clone()) is None
    assert mapped_file_of(torch.empty(2, device="meta")) is None
    gc.collect()
    assert mapped_file_of(view) is mapping  # a view keeps it


def test_views_are_told_apart_while_files_are_mapped_and_forgotten(tmp_path):
    def mapped(number):
        path = tmp_path / str(number)
        path.write_bytes(bytes(mmap.PAGESIZE * (1 + number % 3)))
        return path, map_file(path, path.stat().st_size)

    living = [mapped(number) for number in range(20)]
    for number in range(20, 60):
        del living[number % 7]  # its address may be used again
        living.append(mapped(number))
        for path, view in living:
            assert mapped_file_of(view[-1:]).path == path
        assert mapped_file_of(torch.empty(5)) is None


def test_threads_map_and_forget_files_at_one_time(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    found = []

    def let_others_run(frame, event, argument):
        if frame.f_code.co_filename not in (memory.__file__, weakref.__file__):
            return None
        time.sleep(0)
        return let_others_run

    def map_some():
        for _ in range(15):
            view = map_file(path, 1)
            found.append(mapped_file_of(view) is not None)

    threads = [threading.Thread(target=map_some) for _ in range(4)]
    usual = threading.gettrace()
    threading.settrace(let_others_run)
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.settrace(usual)
    for thread in threads:
        thread.join()
    assert found == [True] * 60


@pytest.mark.wide
def test_the_descriptor_goes_with_the_last_view(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    gc.collect()
    before = len(memory._mappings)
    view = map_file(path, 5000)[:10]
    descriptor = mapped_file_of(view)._descriptor
    os.fstat(descriptor)
    del view
    gc.collect()
    assert len(memory._mappings) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_is_changed_in_place_is_found_out(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    view = map_file(path, 5000)
    mapping = mapped_file_of(view)
    mapping.check_unchanged()
    with open(path, "r+b") as file:
        file.write(b"y")
    with pytest.raises(FileChangedError, match=f"{path} was changed in place"):
        mapping.check_unchanged()


def test_a_file_that_is_replaced_leaves_the_mapping_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    view = map_file(path, 5000)
    (tmp_path / "new").write_bytes(b"y" * 4000)
    os.replace(tmp_path / "new", path)
    mapped_file_of(view).check_unchanged()
    assert bytes(view.tolist()) == b"x" * 5000


@pytest.mark.skipif(memory._malloc_trim() is None, reason="only glibc has malloc_trim")
def test_freed_memory_goes_back_to_the_system():
    code = """
import re, torch
from accel_ckpt.format.memory import trim_heap

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.ones(1 << 22)  # having freed 16 MB once, glibc keeps pieces of that size
begin = resident()
mixed = [(torch.ones(1 << 22), torch.ones(1 << 12)) for _ in range(8)]
kept = [small for _, small in mixed]
del mixed
trim_heap()
print(resident() - begin, all((small == 1).all() for small in kept))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, intact = done.stdout.split()
    assert float(grown) < 8
    assert intact == "True"


def test_without_glibc_freed_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)
    trim_heap()


def test_a_tensor_made_of_others_is_no_view_of_a_file():
    """It has no memory of its own; quantised weights of torchao are such tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    assert mapped_file_of(TwoTensor(torch.ones(2), torch.ones(2))) is None
