"""Copies are what a save would have written, wherever memory is shared, and are made at the right time."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import memory
from accel_ckpt.disk import LOCAL
from accel_ckpt.memory import HostBuffers
from accel_ckpt.saving.save_model import plan_model_files
from accel_ckpt.saving.save_state import StatePlan
from accel_ckpt.saving.staging import Staging
from accel_ckpt.saving.writer import PlannedFile


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", 1 << 14)  # so that tensors lie across the borders of blocks


def plan_of(tensors):
    return StatePlan({}, (PlannedFile("f", tensors, {"format": "pt"}),))


def staged(tensors, optimizers=(), buffers=None):
    return Staging(plan_of(tensors), optimizers, buffers or HostBuffers())


def written(area, folder):
    """What is in the file that the copies become."""
    area.write(folder, LOCAL)
    found = load_file(folder / "f")
    (folder / "f").unlink()
    return found


def sgd(*tensors):
    return torch.optim.SGD([nn.Parameter(t) for t in tensors] or [nn.Parameter(torch.zeros(1))])


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
@pytest.mark.parametrize("later", [False, True])
def test_a_copy_is_equal(tmp_path, kind, later):
    tensor = KINDS[kind].detach()
    area = staged({"t": tensor}, [sgd(tensor)] if later and tensor.is_floating_point() else [])
    area.copy()
    found = written(area, tmp_path)["t"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(raw(found), raw(tensor))


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
    area = Staging(plan, [sgd(weight)], HostBuffers())
    area.copy()
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


def test_only_what_optimizers_step_is_copied_later(tmp_path):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    frozen = torch.ones(4)
    area = staged(
        {"w": parameter.detach(), "m": state["exp_avg"], "buffer": frozen, "grad": parameter.grad},
        [optimizer],
    )
    assert not area.done()
    expected = {"w": parameter.detach().clone(), "m": state["exp_avg"].clone()}
    expected |= {"buffer": torch.ones(4), "grad": torch.ones(4)}
    frozen.fill_(5)  # copied already
    parameter.grad.fill_(5)
    area.copy()
    assert area.done()
    with torch.no_grad():
        parameter.fill_(7)
        state["exp_avg"].fill_(7)
    found = written(area, tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_to_wait_for():
    assert staged({"a": torch.ones(2)}).done()
    assert staged({}).wait(0)


def test_memory_is_used_again_and_not_kept_in_vain(tmp_path):
    buffers = HostBuffers()
    first = staged({"a": torch.ones(10_000)}, [], buffers)
    first.release()
    places = {buffer.data_ptr() for free in buffers._free.values() for buffer in free}
    assert len(places) == 3  # 40,000 bytes and a header
    second = staged({"a": torch.zeros(3_000)}, [], buffers)
    assert buffers._free == {}  # what the second does not need is gone
    assert torch.equal(written(second, tmp_path)["a"], torch.zeros(3_000))
    second.release()
    assert {buffer.data_ptr() for free in buffers._free.values() for buffer in free} <= places


def test_two_saves_at_once_do_not_share_memory(tmp_path):
    buffers = HostBuffers()
    first, second = staged({"a": torch.ones(10)}, [], buffers), staged({"a": torch.zeros(10)}, [], buffers)
    assert torch.equal(written(first, tmp_path)["a"], torch.ones(10))
    assert torch.equal(written(second, tmp_path)["a"], torch.zeros(10))


def test_whoever_waits_is_let_go_when_the_copies_are_complete(tmp_path, monkeypatch):
    parameter = torch.arange(100_000.0)
    gate, begun = threading.Event(), threading.Event()
    real = np.copyto

    def slow(target, source):
        begun.set()
        assert gate.wait(10)
        real(target, source)

    area = staged({"w": parameter}, [sgd(parameter)])
    monkeypatch.setattr(np, "copyto", slow)
    thread = threading.Thread(target=area.copy)
    thread.start()
    waiting = threading.Thread(target=area.hold_back)
    assert begun.wait(10)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert not area.wait(0)
    gate.set()
    waiting.join(10)
    assert not waiting.is_alive()
    thread.join()
    assert torch.equal(written(area, tmp_path)["w"], torch.arange(100_000.0))


def test_a_save_that_is_given_up_lets_go_too(tmp_path):
    parameter = torch.ones(3)
    area = staged({"w": parameter}, [sgd(parameter)])
    area.release()
    area.hold_back()
    assert area.done()
    assert area.write(tmp_path, LOCAL).files == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu(tmp_path):
    buffers = HostBuffers()
    for step in range(3):
        parameter = torch.full((1 << 24,), float(step), device="cuda")
        buffer = torch.full((1 << 20,), float(step), device="cuda")
        turned = torch.full((300, 200), float(step), device="cuda").t()
        tensors = {"w": parameter, "b": buffer, "part": parameter[5:99], "turned": turned}
        area = staged(tensors, [sgd(parameter), sgd(turned)], buffers)
        buffer.fill_(-1)
        area.hold_back()
        parameter.fill_(-1)  # on the device, after the copies
        turned.fill_(-1)
        area.copy()
        found = written(area, tmp_path)
        assert set(found) == set(tensors)
        assert all((t == step).all() for t in found.values())
        area.release()
    assert all(pinned for _, pinned in buffers._free)
