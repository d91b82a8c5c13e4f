"""Device memory in host memory, on a simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_train import OffloadedStatesError
from accel_train.offload.host_copies import HostCopies, HostMemory
from testkit import simulated_device, worlds

ENVIRON = {"ACCELERATE_USE_CPU": "false"}


def on_device(work: Any, *args: Any) -> Any:
    [found] = worlds.run(work, 1, *args, environ=ENVIRON)
    return found


def made(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    simulated_device.use("npu:2")
    return [torch.randn(shape, device="npu:0") for shape in shapes]


def aliases(pinned: bool) -> None:
    """Views, tied tensors and an empty one; memory of more than one block (16 MiB), and of two devices."""
    base, empty = made((5 << 20,), (0,))
    view, elsewhere = base[3:].view(-1, 1), torch.randn(7, device="npu:1")
    expected = base.cpu()
    other = elsewhere.cpu()
    versions = base._version
    before = torch.accelerator.memory_allocated(0)
    named = [("parameters", base), ("gradients", view), ("optimizer", empty), ("optimizer", elsewhere)]
    copies = HostCopies(named, HostMemory(pinned))
    assert torch.accelerator.memory_allocated(0) == before - base.nbytes
    assert copies.freed == {("parameters", "npu:0"): base.nbytes, ("optimizer", "npu:1"): elsewhere.nbytes}
    assert not copies.kept
    for tensor in (base, view, elsewhere):
        with pytest.raises(OffloadedStatesError):
            tensor.sum()
    copies.reload()
    assert torch.equal(base.cpu(), expected)
    assert torch.equal(elsewhere.cpu(), other)
    assert base._version == versions
    view[0] = 5.0
    assert base[3].item() == 5.0


@pytest.mark.wide(only=["True"])
@pytest.mark.simulated
@pytest.mark.parametrize("pinned", [True, False])
def test_memory_comes_back_below_the_same_tensors(pinned):
    on_device(aliases, pinned)


def traffic() -> tuple[dict[str, int], int]:
    [tensor] = made((3 << 20,))
    memory = HostMemory()
    before = torch.npu.counts()
    for _ in range(2):
        HostCopies([("parameters", tensor)], memory).reload()
    after = torch.npu.counts()
    return {key: after[key] - before[key] for key in after}, tensor.nbytes


@pytest.mark.simulated
def test_each_byte_is_copied_once_in_each_direction_and_asynchronously():
    counts, size = on_device(traffic)
    assert counts["to_host_async"] == counts["to_device_async"] == 2 * size
    assert counts["to_host_sync"] == counts["to_device_sync"] == 0


def reused() -> int:
    """Blocks of pinned memory that exist after three sleeps."""
    tensors = made((5 << 20,), (100,))
    memory = HostMemory()
    seen = set()
    taken = memory.buffers.take
    memory.buffers.take = lambda *args: (block := taken(*args), seen.add(block.data_ptr()))[0]
    for _ in range(3):
        HostCopies([("parameters", tensor) for tensor in tensors], memory).reload()
    return len(seen)


@pytest.mark.simulated
def test_host_memory_is_used_again():
    assert on_device(reused) == 2  # 20 MiB are a block of 16 and the rest


def no_host_memory() -> None:
    [tensor] = made((100,))
    memory = HostMemory()

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("no page is free")

    memory.buffers.take = fail
    with pytest.raises(
        OffloadedStatesError, match=r"(?s)400 bytes of pinned host memory.*no page is free.*pin_memory=False"
    ):
        HostCopies([("parameters", tensor)], memory)
    assert tensor.sum().isfinite()


@pytest.mark.simulated
def test_without_host_memory_nothing_moves():
    on_device(no_host_memory)


def shared() -> None:
    first, second = made((10,), (10,))
    memory = HostMemory()
    one = HostCopies([("parameters", first)], memory)
    both = HostCopies([("parameters", first), ("parameters", second)], memory)
    assert both.freed == {("parameters", "npu:0"): 40}
    with pytest.raises(OffloadedStatesError, match="shares tensors"):
        both.check_reload([both])
    both.check_reload([one, both])
    one.check_reload([one])
    one.reload()
    both.check_reload([both])
    both.reload()
    assert (first + second).sum().isfinite()


@pytest.mark.simulated
def test_memory_that_others_have_moved_is_not_moved_twice():
    on_device(shared)


def test_what_is_in_host_memory_stays_and_refuses():
    model = nn.Linear(2, 2)
    copies = HostCopies([("parameters", p) for p in model.parameters()], HostMemory())
    assert not copies.freed
    with pytest.raises(OffloadedStatesError):
        model(torch.ones(1, 2))
    copies.reload()
    assert model(torch.ones(1, 2)).isfinite().all()
