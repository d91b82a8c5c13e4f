"""Reads of boxes: right values from any box into any target, and no more bytes than are needed."""

import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format import box_reads
from accel_ckpt.format.box_reads import BoxRead, read_boxes, spans
from accel_ckpt.format.reader import TensorEntry, read_header
from accel_ckpt.format.writer import write_safetensors
from accel_ckpt.geometry import Box


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes of each request."""
    requests = []
    read = box_reads.read_into

    def reading(file, view, path, offset):
        requests.append(len(view))
        read(file, view, path, offset)

    monkeypatch.setattr(box_reads, "read_into", reading)
    return requests


def entry_of(path, tensor):
    path.unlink(missing_ok=True)
    write_safetensors(path, {"w": tensor})
    return read_header(path).entries["w"]


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    high = [draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    return shape, Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))


limits = st.tuples(
    st.sampled_from([16, 64, 1 << 24]), st.sampled_from([0, 8, 1 << 16]), st.sampled_from([8, 1 << 20])
)


@given(cases(), limits, st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_any_box_goes_to_any_target(tmp_path_factory, case, limits, dtype, strided):
    shape, box = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    entry = entry_of(tmp_path_factory.getbasetemp() / "any.safetensors", whole)
    into = torch.zeros(box.sizes, dtype=dtype)
    if strided:
        into = torch.zeros(*box.sizes, 2, dtype=dtype)[..., 0]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_REQUEST", "_GAP", "_SMALL"), limits, strict=True):
            patch.setattr(box_reads, name, value)
        read_boxes([BoxRead(entry, box, into)])
    assert torch.equal(into, whole[box.slices].to(dtype))


def test_small_tensors_that_are_side_by_side_are_one_request(tmp_path, read_bytes):
    tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(100)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    entries = read_header(tmp_path / "a.safetensors").entries
    into = {name: torch.zeros(64) for name in tensors}
    read_boxes(BoxRead(entries[name], Box((0,), (64,)), into[name]) for name in tensors)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    assert read_bytes == [100 * 256]


def test_rows_are_read_without_the_others(tmp_path, read_bytes):
    whole = torch.randn(4096, 1024)
    entry = entry_of(tmp_path / "a.safetensors", whole)
    into = torch.zeros(1024, 1024)
    read_boxes([BoxRead(entry, Box((1024, 0), (1024, 1024)), into)])
    assert torch.equal(into, whole[1024:2048])
    assert sum(read_bytes) == into.nbytes


def test_columns_with_large_gaps_are_read_without_them_and_small_gaps_along(tmp_path, read_bytes):
    whole = torch.randn(8, 1 << 17)
    entry = entry_of(tmp_path / "a.safetensors", whole)
    into = torch.zeros(8, 1 << 15)
    read_boxes([BoxRead(entry, Box((0, 1 << 16), (8, 1 << 15)), into)])
    assert torch.equal(into, whole[:, 1 << 16 : 3 << 15])
    assert read_bytes == [into.nbytes // 8] * 8
    read_bytes.clear()
    near = torch.zeros(8, (1 << 17) - 16)
    read_boxes([BoxRead(entry, Box((0, 16), (8, (1 << 17) - 16)), near)])
    assert torch.equal(near, whole[:, 16:])
    assert len(read_bytes) == 1


def test_no_request_is_larger_than_the_limit(tmp_path, read_bytes):
    whole = torch.arange(5_000_000.0)
    entry = entry_of(tmp_path / "a.safetensors", whole)
    into = torch.zeros(5_000_000)
    read_boxes([BoxRead(entry, Box((0,), (5_000_000,)), into)])
    assert torch.equal(into, whole)
    assert max(read_bytes) <= 1 << 24
    assert sum(read_bytes) == into.nbytes


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    entry = entry_of(tmp_path / "a.safetensors", torch.zeros(100))
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(200)
    with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors ended while it was read"):
        read_boxes([BoxRead(entry, Box((0,), (100,)), torch.zeros(100))])


def test_values_that_the_file_does_not_align_are_read(tmp_path):
    entry = entry_of(tmp_path / "a.safetensors", torch.arange(100.0))
    into = torch.zeros(98)
    loose = entry._replace(dtype=torch.float32, shape=(99,), offset=entry.offset + 2, nbytes=396)
    read_boxes([BoxRead(loose, Box((1,), (98,)), into)])
    expected = torch.arange(100.0).view(torch.uint8)[6:398].clone().view(torch.float32)
    assert torch.equal(into, expected)


def test_many_files_are_open_one_at_a_time(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    entries = [entry_of(tmp_path / f"{i}.safetensors", torch.full((3,), float(i))) for i in range(100)]
    into = torch.zeros(100, 3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limit[1]))
    try:
        read_boxes(BoxRead(e, Box((0,), (3,)), row) for e, row in zip(entries, into, strict=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert torch.equal(into[:, 0], torch.arange(100.0))


def test_autograd_notices_that_values_changed(tmp_path):
    entry = entry_of(tmp_path / "a.safetensors", torch.ones(3))
    weight = torch.zeros(3, requires_grad=True)
    result = weight.square().sum()
    read_boxes([BoxRead(entry, Box((0,), (3,)), weight.detach())])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@settings(deadline=None)
@given(st.data())
def test_spans_hold_every_byte_that_is_read_and_little_else(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    begins = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - b)) for n, b in zip(shape, begins, strict=True)]
    gap = data.draw(st.sampled_from([0, 4, 40, 1 << 20]))
    count = torch.Size(shape).numel()
    entry = TensorEntry("t", torch.float32, shape, Path("file"), 100, 4 * count)
    read = BoxRead(entry, Box(tuple(begins), tuple(sizes)), torch.empty(sizes))
    wanted = torch.arange(count).reshape(shape)[Box(tuple(begins), tuple(sizes)).slices].flatten().tolist()
    found = spans(read, gap)
    assert found.file == Path("file")
    covered = [byte for begin, end in found.ranges for byte in range(begin, end)]
    assert len(covered) == len(set(covered))  # each once
    needed = {100 + 4 * index + byte for index in wanted for byte in range(4)}
    assert needed <= set(covered)
    assert set(covered) <= set(range(min(needed), max(needed) + 1))
    if gap == 0:
        assert set(covered) == needed
    if gap == 1 << 20:
        assert len(found.ranges) == 1


def test_nothing_has_no_spans():
    entry = TensorEntry("t", torch.float32, (2, 0), Path("file"), 100, 0)
    assert spans(BoxRead(entry, Box((0, 0), (2, 0)), torch.empty(2, 0)), 0) is None
    assert spans(BoxRead(torch.ones(2), Box((0,), (2,)), torch.empty(2)), 0) is None
