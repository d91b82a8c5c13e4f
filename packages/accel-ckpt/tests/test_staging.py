"""Copies are what a save would have written, wherever memory is shared, and are made at the right time."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from accel_ckpt import staging
from accel_ckpt.model import plan_model_files
from accel_ckpt.saving import PlannedFile, StatePlan
from accel_ckpt.staging import HostBuffers, Staging
from accel_ckpt.writer import write_safetensors


def plan_of(tensors, write=None):
    return StatePlan(
        {}, (PlannedFile("f", tensors, write or (lambda path, t, disk: write_safetensors(path, t))),)
    )


def staged(tensors, optimizers=(), buffers=None):
    return Staging(plan_of(tensors), optimizers, buffers or HostBuffers())


def copies(staging):
    return staging.plan.files[0].tensors


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
def test_a_copy_is_equal_and_apart(kind, later):
    tensor = KINDS[kind].detach()
    area = staged({"t": tensor}, [sgd(tensor)] if later and tensor.is_floating_point() else [])
    area.copy()
    copied = copies(area)["t"]
    assert (copied.dtype, copied.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(raw(copied), raw(tensor))
    if tensor.numel():
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    if kind in ("transposed", "channels_last"):
        assert copied.stride() == tensor.stride()


def test_what_is_one_stays_one_and_files_are_the_same(tmp_path):
    weight = torch.randn(8, 8)
    tensors = {
        "a": weight,
        "b": weight,
        "turned": weight.t(),
        "half": torch.randn(8, 8)[:4],
        "other": torch.randn(3),
    }
    model = plan_model_files(tensors, 10**9, False, "pytorch_model")
    plan = plan_of(tensors, model.write)
    area = Staging(plan, [sgd(weight)], HostBuffers())
    area.copy()
    plan.write(tmp_path)
    (tmp_path / "f").rename(tmp_path / "original")
    area.plan.write(tmp_path)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "original").read_bytes()
    loaded = torch.load(tmp_path / "f", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["turned"].data_ptr()


def test_only_what_optimizers_step_is_copied_later():
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
    before = {"w": parameter.detach().clone(), "m": state["exp_avg"].clone()}
    frozen.fill_(5)  # copied already
    parameter.grad.fill_(5)
    assert torch.equal(copies(area)["buffer"], torch.ones(4))
    assert torch.equal(copies(area)["grad"], torch.ones(4))
    area.copy()
    assert area.done()
    with torch.no_grad():
        parameter.fill_(7)
        state["exp_avg"].fill_(7)
    assert torch.equal(copies(area)["w"], before["w"])
    assert torch.equal(copies(area)["m"], before["m"])


def test_nothing_to_wait_for():
    assert staged({"a": torch.ones(2)}).done()
    assert staged({}).wait(0)


def test_memory_is_used_again_and_not_kept_in_vain():
    buffers = HostBuffers()
    first = staged({"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(7)}, [], buffers)
    places = {name: t.data_ptr() for name, t in copies(first).items()}
    first.release()
    second = staged({"a": torch.zeros(10), "b": torch.zeros(10)}, [], buffers)
    assert {t.data_ptr() for t in copies(second).values()} == {places["a"], places["b"]}
    assert torch.equal(copies(second)["a"], torch.zeros(10))
    second.release()
    assert sum(len(free) for free in buffers._free.values()) == 2  # that of "c" is gone


def test_two_saves_at_once_do_not_share_memory():
    buffers = HostBuffers()
    first, second = staged({"a": torch.ones(10)}, [], buffers), staged({"a": torch.zeros(10)}, [], buffers)
    assert torch.equal(copies(first)["a"], torch.ones(10))
    assert torch.equal(copies(second)["a"], torch.zeros(10))


def test_whoever_waits_is_let_go_when_the_copies_are_complete(monkeypatch):
    monkeypatch.setattr(staging, "_PIECE", 16)
    parameter = torch.arange(100.0)
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
    assert torch.equal(copies(area)["w"], torch.arange(100.0))


def test_a_save_that_is_given_up_lets_go_too():
    parameter = torch.ones(3)
    area = staged({"w": parameter}, [sgd(parameter)])
    area.release()
    area.hold_back()
    assert area.done()
    assert area.plan.files == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu():
    buffers = HostBuffers()
    for step in range(3):
        parameter = torch.full((1 << 24,), float(step), device="cuda")
        buffer = torch.full((1 << 20,), float(step), device="cuda")
        area = staged({"w": parameter, "b": buffer, "part": parameter[5:99]}, [sgd(parameter)], buffers)
        buffer.fill_(-1)
        area.hold_back()
        parameter.fill_(-1)  # on the device, after the copies
        area.copy()
        assert all(t.is_pinned() and (t == step).all() for t in copies(area).values())
        area.release()
