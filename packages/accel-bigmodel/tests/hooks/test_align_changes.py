"""Offloaded modules that change, hooks that move on, beginnings that fail, calls of several threads."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from accel_bigmodel import (
    AlignDevicesHook,
    DeviceMapError,
    OffloadError,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
)
from accel_bigmodel.hooks import align
from accel_ckpt import UninitializedTensorError
from testkit.aligned import Block, where


@pytest.fixture
def x():
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("append", [False, True])
def test_hooks_that_cannot_begin_leave_the_module_and_its_hook_as_they_were(x, append):
    block = Block()
    weights, expected = block.scale, block(x)
    before = AlignDevicesHook("cpu", offload=True)
    bad = SequentialHook(AlignDevicesHook("cpu", offload=True), AlignDevicesHook("moon"))
    with pytest.raises(DeviceMapError):
        add_hook_to_module(block, bad)
    assert block.scale is weights
    add_hook_to_module(block, before)
    with pytest.raises(UninitializedTensorError if append else DeviceMapError):
        add_hook_to_module(block, bad, append=append)
    assert block._hf_hook is before
    assert block.scale.is_meta
    assert torch.equal(block(x), expected)
    remove_hook_from_module(block)
    assert block.scale is weights


def test_a_device_that_is_full_leaves_the_module_as_it_was(x, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError

    block = Block()
    expected = block(x)
    monkeypatch.setattr(align, "_put_on", full)
    with pytest.raises(torch.OutOfMemoryError):
        add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    assert torch.equal(block(x), expected)


def test_a_tensor_that_somebody_takes_away_is_not_missed(x):
    block = nn.BatchNorm1d(4).eval()
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    block.bias = None
    del block.num_batches_tracked
    assert torch.equal(block(x), nn.BatchNorm1d(4).eval()(x))
    remove_hook_from_module(block)
    assert block.bias is None
    assert where(block) == {"weight": "cpu", "running_mean": "cpu", "running_var": "cpu"}


def test_a_hook_that_goes_to_another_module_leaves_the_first_one_its_weights(x):
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    weight, expected = first.weight, (first(x), second(x))
    hook = AlignDevicesHook("cpu", offload=True)
    for module in (first, second):
        add_hook_to_module(module, hook)
    assert first.weight is weight
    assert second.weight.is_meta
    assert all(map(torch.equal, (first(x), second(x)), expected))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "normalise",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.identity(module, "weight"),
    ],
)
def test_weights_that_are_needed_before_forward_are_not_offloaded(normalise, x):
    # PyTorch multiplies with what is on the meta device without a word.
    module = nn.Sequential(normalise(nn.Linear(4, 4))).eval()
    expected = module(x)
    with pytest.raises(OffloadError, match=r"computes a weight of Linear '0' before its forward"):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    assert torch.equal(module(x), expected)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))  # offloads nothing of it
    assert torch.equal(module(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_torch_jit_compiled_is_not_offloaded(x):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    expected = model(x)
    with pytest.raises(OffloadError, match=r"RecursiveScriptModule '?.*compiled by torch\.jit"):
        attach_align_device_hook(model, "cpu", offload=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    add_hook_to_module(model[1], AlignDevicesHook("cpu"))
    assert torch.equal(model(x), expected)


def test_weights_that_are_computed_in_forward_are_offloaded(x):
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    expected = module(x)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    assert torch.equal(module(x), expected)


def test_a_call_of_another_thread_in_the_middle_of_loading(x):
    loading, other_runs, first_runs = threading.Event(), threading.Event(), threading.Event()

    class Slow(dict):
        def __getitem__(self, name):
            if name == "bias" and not loading.is_set():
                loading.set()
                other_runs.wait(0.1)
            return super().__getitem__(name)

    class Layer(nn.Linear):
        def forward(self, x):
            if threading.current_thread() is other:
                other_runs.set()
                first_runs.wait(0.1)
            else:
                first_runs.set()
            return super().forward(x)

    def call_too():
        loading.wait(5)
        found.append(layer(x))

    layer, found, other = Layer(4, 4), [], threading.Thread(target=call_too)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=Slow(layer.state_dict())))
    other.start()
    found.append(layer(x))
    other.join()
    assert len(found) == 2
    assert all(torch.equal(each, expected) for each in found)
    assert where(layer) == {"weight": "meta", "bias": "meta"}


def test_outputs_go_back_to_where_the_input_of_their_own_thread_was():
    first_runs, second_runs, first_is_done = (threading.Event() for _ in range(3))

    class Overlapping(nn.Module):
        def forward(self, x):
            mine, other = (first_runs, second_runs) if x.is_meta else (second_runs, first_is_done)
            mine.set()
            assert other.wait(10)
            return x

    def call_second():
        first_runs.wait(10)
        found.append(module(torch.ones(1)).device.type)

    module = add_hook_to_module(Overlapping(), AlignDevicesHook(io_same_device=True))
    found, second = [], threading.Thread(target=call_second)
    second.start()
    try:
        assert module(torch.ones(1, device="meta")).is_meta
    finally:
        first_is_done.set()
        second.join()
    assert found == ["cpu"]
