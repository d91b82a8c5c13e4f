"""Copies are what a save would have written, wherever memory is shared, and are complete at once."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt.disk import LOCAL
from accel_ckpt.format import memory
from accel_ckpt.format.memory import HostBuffers
from accel_ckpt.format.writer import PlannedFile
from accel_ckpt.saving.save_model import plan_model_files
from accel_ckpt.saving.save_state import StatePlan
from accel_ckpt.saving.staging import Staging
from testkit.accelerators import this_accelerator


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", 1 << 14)  # so that tensors lie across the borders of blocks


def plan_of(tensors):
    return StatePlan({}, (PlannedFile("f", tensors, {"format": "pt"}),))


def staged(tensors, buffers=None):
    return Staging(plan_of(tensors), buffers or HostBuffers())


def written(area, folder):
    """What is in the file that the copies become."""
    area.write(folder, LOCAL)
    found = load_file(folder / "f")
    (folder / "f").unlink()
    return found


def raw(tensor):
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


base = torch.arange(24.0).view(4, 6)
KINDS = {
    "plain": torch.randn(3, 4),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part": base[1:3],
    "strided part": base[:, ::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_holds_nothing_of_the_tensor(tmp_path, kind):
    tensor = KINDS[kind].detach().clone(memory_format=torch.preserve_format)
    expected = raw(tensor).clone()
    area = staged({"t": tensor})
    tensor.zero_()
    found = written(area, tmp_path)["t"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(raw(found), expected)


@pytest.mark.parametrize("safe", [True, False])
def test_files_are_the_same_as_without_copies(tmp_path, safe):
    weight = torch.randn(80, 80)
    tensors = {
        "a": weight,
        "b": weight,
        "turned": weight.t(),
        "half": torch.randn(80, 80)[:40],
        "other": torch.randn(3),
        "large": torch.randn(50_000),
    }
    plan = StatePlan({"text": b"{}"}, plan_model_files(tensors, 10**5, safe, "model").files)
    area = Staging(plan, HostBuffers())
    for folder in ("original", "copy"):
        (tmp_path / folder).mkdir()
    expected = plan.write(tmp_path / "original")
    weight.zero_()
    tensors["large"].zero_()
    assert area.write(tmp_path / "copy", LOCAL) == expected
    names = sorted(path.name for path in (tmp_path / "original").iterdir())
    assert len(names) > 2
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "original" / name).read_bytes(), name


def test_memory_is_used_again_and_not_kept_in_vain(tmp_path):
    buffers = HostBuffers()
    first = staged({"a": torch.ones(10_000)}, buffers)
    first.release()
    places = {buffer.data_ptr() for free in buffers._free.values() for buffer in free}
    assert len(places) == 3  # 40,000 bytes and a header
    second = staged({"a": torch.zeros(3_000)}, buffers)
    assert buffers._free == {}  # what the second does not need is gone
    assert torch.equal(written(second, tmp_path)["a"], torch.zeros(3_000))
    second.release()
    assert {buffer.data_ptr() for free in buffers._free.values() for buffer in free} <= places


def test_two_saves_at_once_do_not_share_memory(tmp_path):
    buffers = HostBuffers()
    first, second = staged({"a": torch.ones(10)}, buffers), staged({"a": torch.zeros(10)}, buffers)
    assert torch.equal(written(first, tmp_path)["a"], torch.ones(10))
    assert torch.equal(written(second, tmp_path)["a"], torch.zeros(10))


def test_a_save_that_is_given_up_writes_nothing(tmp_path):
    area = staged({"w": torch.ones(3)})
    area.release()
    assert area.write(tmp_path, LOCAL).files == {}


@pytest.mark.gpu
def test_copies_from_a_device(tmp_path):
    device = this_accelerator()
    buffers = HostBuffers()
    for step in range(3):
        parameter = torch.full((1 << 24,), float(step), device=device)
        buffer = torch.full((1 << 20,), float(step), device=device)
        turned = torch.full((300, 200), float(step), device=device).t()
        tensors = {"w": parameter, "b": buffer, "part": parameter[5:99], "turned": turned}
        area = staged(tensors, buffers)
        other = torch.Stream(device)
        with other:  # which waits for nothing of the stream that copied
            for changed in (parameter, buffer, turned):
                changed.fill_(-1)
                changed.record_stream(other)
        found = written(area, tmp_path)
        assert set(found) == set(tensors)
        assert all((t == step).all() for t in found.values())
        area.release()
    assert all(pinned for _, pinned in buffers._free)


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_by_several_threads_are_the_same(tmp_path, threads):
    before = torch.get_num_threads()
    tensors = {f"t{number}": torch.randn(number * 37 % 5000 + 1) for number in range(200)}
    tensors |= {"turned": torch.randn(70, 90).t(), "large": torch.randn(1 << 18)}
    torch.set_num_threads(threads)
    try:
        area = staged(tensors)
    finally:
        torch.set_num_threads(before)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    found = written(area, tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
