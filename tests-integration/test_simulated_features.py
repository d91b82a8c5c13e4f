"""What is beside training and streaming, on simulated devices: memory, guards, figures, profiles, random states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload_with_hook,
)
from accel_state import find_executable_batch_size, release_memory
from accel_train import Accelerator, ProfileKwargs, ThroughputMeter
from testkit import simulated_device, worlds

pytestmark = pytest.mark.simulated

MIB = 1 << 20


def on_device(kind: str = "npu") -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    simulated_device.use(f"{kind}:2")
    return torch.device(kind, 0)


def alone(function: Any, *args: Any) -> Any:
    [found] = worlds.run(function, 1, *args)
    return found


def synchronizations() -> int:
    count: int = torch.npu.counts()["synchronizations"]
    return count


def find_batch_size(kind: str) -> tuple[list[int], int]:
    """The sizes that were tried where ten MiB are there and a sample takes one, and what is left in use."""
    device = on_device(kind)
    torch.get_device_module(kind).set_capacity(10 * MIB, 0)
    tried = []

    def run(size: int, scale: float) -> float:
        tried.append(size)
        samples = [torch.full((MIB // 4,), scale, device=device) for _ in range(size)]
        return sum(samples[1:], samples[0])[0].item()

    found = find_executable_batch_size(
        run, starting_batch_size=32, reduce_batch_size_fn=lambda size: size // 2
    )
    assert found(0.5) == 8 * 0.5
    assert found(2.0) == 8 * 2.0  # at once
    return tried, torch.accelerator.memory_allocated()


@pytest.mark.parametrize("kind", ["npu", "brandnew"])
def test_a_batch_size_that_fits(kind):
    assert alone(find_batch_size, kind) == ([32, 16, 8, 8], 0)


def release() -> tuple[int, int]:
    device = on_device()
    a, b = (torch.zeros(MIB, device=device) for _ in range(2))
    before = torch.accelerator.memory_reserved()
    a, b = release_memory(a, b)
    torch.accelerator.empty_cache()
    return before, torch.accelerator.memory_reserved()


def test_memory_is_released():
    before, after = alone(release)
    assert before >= 8 * MIB
    assert after == 0


FACTORS = [
    1,
    1,
    2,
    1,
    1,
    50,
    1,
    float("nan"),
    1,
    40,
    1,
    1,
    float("inf"),
    3,
    1,
    1,
]  # of the loss of each update


def guarded(kind: str) -> Any:
    """Weights after each update, which updates were skipped, and how often the host waited in an update."""
    device = on_device(kind)
    accelerator = Accelerator(cpu=kind == "cpu")
    accelerator.guard_steps(loss_spike=5.0, warmup=3)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    inputs = torch.randn(len(FACTORS), 4, 3, generator=torch.Generator().manual_seed(5)).to(device)
    weights, skipped, waits = [], [], []
    for x, factor in zip(inputs, FACTORS, strict=True):
        before = synchronizations() if kind != "cpu" else 0
        accelerator.backward((model(x) ** 2).mean() * factor + 0.5)
        optimizer.step()
        optimizer.zero_grad()
        waits.append(synchronizations() - before if kind != "cpu" else 0)
        skipped.append(optimizer.step_was_skipped)
        weights.append(model.weight.detach().cpu().clone())
    return torch.stack(weights), skipped, accelerator.step_guard.skipped, waits


def test_a_guard_skips_what_it_skips_on_the_cpu():
    weights, skipped, counts, _ = alone(guarded, "cpu")
    found, found_skipped, found_counts, waits = alone(guarded, "npu")
    assert counts["gradients"] == 2
    assert counts["loss"] > 0
    assert (found_skipped, found_counts) == (skipped, counts)
    torch.testing.assert_close(found, weights)
    assert max(waits) <= 1  # the documented read of three numbers


def measured() -> Any:
    device = on_device()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    meter = ThroughputMeter(accelerator, warmup=1)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.randn(8, 4, device=device)
    before = synchronizations()
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).mean())
            optimizer.step()
            optimizer.zero_grad()
            meter.update(torch.tensor(8 + step).to(device, non_blocking=True))
    waits = synchronizations() - before
    return meter.read(), waits


def test_items_are_counted_on_the_device():
    figures, waits = alone(measured)
    assert figures.items == sum(8 + step for step in range(6))
    assert figures.steps == 3
    assert figures.items_per_second > 0
    assert figures.peak_memory > 0
    assert waits <= 6  # of the script, whose number of items is in pageable memory


def profiled(folder: str) -> list[str]:
    on_device()
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(4, 1))
    with accelerator.profile(ProfileKwargs(output_trace_dir=folder, profile_memory=True)) as profiler:
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
    return [event.key for event in profiler.key_averages()]


def test_a_profile_has_the_operators(tmp_path):
    names = alone(profiled, str(tmp_path))
    assert {"aten::addmm", "aten::sum"} <= set(names)
    [trace] = Path(tmp_path).glob("*.json")
    assert any("addmm" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])


def drawn(folder: str, resumed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout on the device and the host's generator draw after the state was saved, or loaded."""
    device = on_device()
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    torch.manual_seed(11 if resumed else 3)
    for _ in range(5 if resumed else 2):
        nn.functional.dropout(torch.ones(8, device=device))
    if resumed:
        accelerator.load_state(folder)
    else:
        accelerator.save_state(folder)
    assert model is not None
    kept = nn.functional.dropout(torch.ones(64, device=device)), torch.randn(4, device=device)
    return torch.cat([each.cpu() for each in kept]), torch.rand(4)


def test_random_states_of_a_device_are_resumed(tmp_path):
    here, host = alone(drawn, str(tmp_path / "state"), False)
    there, other = alone(drawn, str(tmp_path / "state"), True)
    assert torch.equal(here, there)
    assert torch.equal(host, other)


def one_after_the_other() -> tuple[list[str], int]:
    """Where two models are after each call, and the most memory that was in use."""
    device = on_device()
    torch.manual_seed(0)
    models = [nn.Linear(256, 256) for _ in range(2)]
    with torch.no_grad():
        expected = models[1](models[0](torch.ones(1, 256)))
    first, hook = cpu_offload_with_hook(models[0], device)
    second, last = cpu_offload_with_hook(models[1], device, prev_module_hook=hook)
    assert isinstance(last, UserCpuOffloadHook)
    torch.accelerator.reset_peak_memory_stats()
    places = []
    with torch.no_grad():
        for _ in range(2):
            found = second(first(torch.ones(1, 256)))
            places += [model.weight.device.type for model in models]
            last.offload()
    peak = torch.accelerator.max_memory_allocated()
    assert torch.equal(found.cpu(), expected)
    simulated_device.check()
    return places, peak


def test_models_take_turns_on_a_device():
    places, peak = alone(one_after_the_other)
    assert places == ["cpu", "npu"] * 2
    assert peak < 1.1 * 256 * 257 * 4


def aligned() -> None:
    device = on_device()
    layer = nn.Linear(4, 4)
    weight = layer.weight
    with torch.no_grad():
        expected = layer(torch.ones(1, 4))
        with align_module_device(layer, device):
            assert layer.weight.device == device
            assert torch.equal(layer(torch.ones(1, 4, device=device)).cpu(), expected)
        assert layer.weight is weight
        assert weight.device.type == "cpu"
        add_hook_to_module(
            layer, AlignDevicesHook(execution_device=device, offload=True, io_same_device=True)
        )
        for _ in range(2):
            found = layer(torch.ones(1, 4))
            assert found.device.type == "cpu"
            assert torch.equal(found, expected)
        assert layer.weight.is_meta


def test_hooks_bring_weights_to_a_device():
    alone(aligned)


def cast() -> int:
    device = on_device()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    expected = rows
    with torch.no_grad():
        for layer in model:
            weight, bias = (value.cpu().bfloat16().float() for value in (layer.weight, layer.bias))
            expected = nn.functional.linear(expected, weight, bias)
        attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, non_blocking=True)
        found = model(rows.to(device))
    torch.testing.assert_close(found.cpu(), expected)
    simulated_device.check()
    return sum(value.nbytes for value in model.parameters())


def test_weights_are_stored_in_half_on_a_device():
    assert alone(cast) == 4 * 65 * 64 * 2
