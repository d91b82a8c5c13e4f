"""Models that do not fit, on simulated devices: equal to the CPU, in order, and within the memory that was planned."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_stats,
    undispatch,
)
from testkit import simulated_device, worlds

pytestmark = pytest.mark.simulated

WIDTH, BLOCKS = 128, 12


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).eval()


def inputs() -> list[torch.Tensor]:
    return [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def on_two_devices() -> torch.device:
    simulated_device.use("npu:2")
    torch.npu.allow_set_data(os.environ["SET_DATA"] == "allowed")
    return torch.device("npu", 0)


@pytest.fixture(autouse=True, params=["allowed", pytest.param("refused", marks=pytest.mark.full)])
def set_data(request, monkeypatch):
    """Whether the device lets `tensor.data` come from another one, as CUDA does."""
    monkeypatch.setenv("SET_DATA", request.param)


@torch.no_grad()
def check(model: nn.Module, device: torch.device) -> None:
    """Forwards that are queued one behind the other, without a wait of the host between them."""
    whole = build()
    found = [model(each.to(device)) for each in inputs()]
    for each, outputs in zip(inputs(), found, strict=True):
        assert torch.equal(outputs.cpu(), whole(each))
    simulated_device.check()


def run_alone(function, *args) -> None:
    worlds.run(function, 1, *args, timeout=120)


def stream(place: str, folder: str) -> None:
    device = on_two_devices()
    model = build()
    if place == "host":
        cpu_offload(model, execution_device=device)
    else:
        disk_offload(model, folder, execution_device=device)
    torch.accelerator.reset_peak_memory_stats()
    check(model, device)
    stats = offload_stats(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert stats.bytes_moved >= 3 * weights
    assert stats.peak_bytes < weights / 2
    # What is computed is 2 kB here.
    assert torch.accelerator.max_memory_allocated() <= 1.02 * stats.peak_bytes + 16_384
    moved = torch.npu.counts()
    assert moved["to_device_async"] >= 3 * weights
    assert moved["to_device_sync"] < 16_384  # inputs
    undispatch(model)
    assert torch.equal(model(inputs()[0]), build()(inputs()[0]))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_weights_are_streamed_to_a_device(place, tmp_path):
    run_alone(stream, place, str(tmp_path))


def forget(place: str, folder: str, how: str) -> None:
    device = on_two_devices()
    torch.npu.set_lateness(0.05)
    for _ in range(3):
        model = build()
        if place == "host":
            cpu_offload(model, execution_device=device)
        else:
            disk_offload(model, folder, execution_device=device)
        with torch.no_grad():
            outputs = model(inputs()[0].to(device))
        if how == "undispatched":
            undispatch(model)
        del model
        gc.collect()
        torch.zeros(WIDTH * WIDTH, device=device)  # takes memory that was given back too early
        assert torch.equal(outputs.cpu(), build()(inputs()[0]))
    simulated_device.check()


@pytest.mark.parametrize("how", ["undispatched", "dropped"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_model_is_forgotten_while_its_copies_run(place, how, tmp_path):
    run_alone(forget, place, str(tmp_path), how)


def stop_inside(place: str, folder: str, how: str) -> None:
    """A forward ends by an error while the weights of the next blocks are being copied; nobody waits for those."""
    device = on_two_devices()
    model = build()
    if how == "undispatched":  # its memory belongs to the script again, which may change it
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    if place == "host":
        cpu_offload(model, execution_device=device)
    else:
        disk_offload(model, folder, execution_device=device)
    x = inputs()[0].to(device)
    with torch.no_grad():
        model(x)  # so that all memory is there
        torch.npu.set_lateness(0.5)
        model[5][1].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
    if how == "undispatched":
        undispatch(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    del model
    gc.collect()
    taken = [
        torch.zeros(size, device=device) for size in (WIDTH * WIDTH, WIDTH * WIDTH + WIDTH) for _ in range(4)
    ]
    assert not any(each.any() for each in taken)
    simulated_device.check()


@pytest.mark.parametrize("how", ["undispatched", "dropped"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_forward_ends_by_an_error_while_copies_run(place, how, tmp_path):
    run_alone(stop_inside, place, str(tmp_path), how)


def other_stream() -> None:
    device = on_two_devices()
    model = build()
    cpu_offload(model, execution_device=device)
    side = torch.Stream(device)
    with torch.no_grad(), side:
        found = [model(each.to(device)) for each in inputs()]
    side.synchronize()
    for each, outputs in zip(inputs(), found, strict=True):
        assert torch.equal(outputs.cpu(), build()(each))
    simulated_device.check()


def test_the_computing_stream_is_not_the_default_one():
    run_alone(other_stream)


def dispatch(device_map, folder: str) -> None:
    device = on_two_devices()
    save_file(build().state_dict(), f"{folder}/model.safetensors")
    with init_empty_weights():
        model = build()
    if device_map == "auto":
        for index in range(2):
            torch.npu.set_capacity(WIDTH * WIDTH * 4 * BLOCKS, index)
    load_checkpoint_and_dispatch(
        model, f"{folder}/model.safetensors", device_map=device_map, offload_folder=f"{folder}/offload"
    )
    check(model, device)


HALVES = {str(n): f"npu:{n // 6}" for n in range(BLOCKS)}
MIXED = {str(n): ["npu:0", "cpu", "disk", "npu:1"][n % 4] for n in range(BLOCKS)}


@pytest.mark.parametrize(
    "device_map", [{"": "npu:0"}, HALVES, MIXED, "auto"], ids=["one", "two", "mixed", "auto"]
)
def test_a_model_is_loaded_onto_devices(device_map, tmp_path):
    run_alone(dispatch, device_map, str(tmp_path))


def back_and_forth() -> None:
    device = on_two_devices()
    model = dispatch_model(build(), HALVES)
    check(model, device)
    undispatch(model)
    model.to(device)
    check(model, device)


def test_a_model_moves_between_devices():
    run_alone(back_and_forth)
