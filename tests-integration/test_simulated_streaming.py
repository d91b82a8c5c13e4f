"""Models that do not fit, on simulated devices: equal to the CPU, in order, and within the memory that was planned."""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    DeviceMapError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
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


class Scales(nn.Module):
    """A module of buffers, which several blocks may share."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Residual(nn.Module):
    """A block that stays whole, with parts of its own or of other blocks."""

    def __init__(self, linear: nn.Module, scales: nn.Module, deep: bool) -> None:
        super().__init__()
        self.linear = linear
        self.parts = nn.ModuleDict({"scales": nn.Sequential(scales) if deep else scales})
        self.register_buffer("own", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts["scales"](self.linear(x)) * self.own


def shared_model(seed: int) -> nn.Module:
    """Blocks in chains of several depths that share modules, parameters and buffers."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    scales = [Scales(persistent) for persistent in (True, False)]
    linears = [nn.Linear(8, 8) for _ in range(2)]
    blocks: list[nn.Module] = []
    for _ in range(choose.randint(2, 7)):
        if blocks and choose.random() < 0.1:
            blocks.append(choose.choice(blocks))
            continue
        linear = choose.choice(linears) if choose.random() < 0.1 else nn.Linear(8, 8)
        if choose.random() < 0.1:
            linear.bias = linears[0].bias
        part = choose.choice(scales) if choose.random() < 0.3 else Scales(choose.random() < 0.5)
        if choose.random() < 0.2:
            part.scale = scales[0].scale
        blocks.append(Residual(linear, part, choose.random() < 0.5))
    half = choose.randrange(len(blocks))
    return nn.Sequential(nn.Sequential(*blocks[:half]), *blocks[half:], nn.Linear(8, 8)).eval()


def place_shared_models(seeds: range, folder: str) -> None:
    on_two_devices()
    x = torch.randn(3, 8)
    computed = refused = 0
    for seed in seeds:
        choose = random.Random(seed)
        model = shared_model(seed)
        with torch.no_grad():
            expected = model(x)
        total = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        memory = {
            place: choose.randrange(total) + 100
            for place in choose.sample([0, 1, "cpu"], choose.randint(1, 3))
        }
        options = {"offload_buffers": choose.random() < 0.5}
        try:
            if choose.random() < 0.7:
                found = infer_auto_device_map(
                    model,
                    memory,
                    ["Residual", "Scales"],
                    fallback_allocation=choose.random() < 0.3,
                    **options,
                )
            else:
                names = [f"0.{name}" for name, _ in model[0].named_children()]
                names += [name for name, _ in model.named_children() if name != "0"]
                found = {name: choose.choice([0, 0, 1, "cpu"]) for name in names}
            dispatch_model(model, found, offload_dir=f"{folder}/{seed}", force_hooks=True, **options)
        except DeviceMapError:
            refused += 1
            continue
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(model(x).cpu(), expected), (seed, found)
        undispatch(model)
        computed += 1
    assert computed > 5 * refused > 0, (computed, refused)
    simulated_device.check()


@pytest.mark.wide(only=["allowed"])
def test_models_that_share_modules_and_buffers_compute_or_are_refused(tmp_path):
    run_alone(place_shared_models, range(150), str(tmp_path))
