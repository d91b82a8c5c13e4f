"""Models that take turns. The meta device computes; models that note where they are sent play those on it."""

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    CpuOffload,
    DeviceMapError,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    cpu_offload_with_hook,
)


class Noted(nn.Linear):
    """Says where it was sent, and is there: without a second device nothing could come back from one."""

    def __init__(self, log, name):
        super().__init__(2, 2)
        self.log, self.name = log, name

    def to(self, device):
        self.log.append((self.name, torch.device(device).type))
        for leaf, parameter in list(self._parameters.items()):
            self._parameters[leaf] = nn.Parameter(torch.zeros_like(parameter, device=device))
        return self


@pytest.fixture
def log():
    return []


def device(model):
    return next(model.parameters()).device.type


def test_a_model_comes_when_called_and_stays_until_told(log):
    model = Noted(log, "a")
    found, hook = cpu_offload_with_hook(model, "meta")
    assert found is model
    assert isinstance(hook, UserCpuOffloadHook)
    assert hook.model is model
    assert hook.hook is model._hf_hook
    assert model._hf_hook.execution_device == torch.device("meta")
    assert device(model) == "cpu"
    assert model(torch.ones(1, 2)).is_meta
    assert device(model) == "meta"
    assert model(torch.ones(1, 2)).is_meta  # inputs follow a model that is there already
    hook.offload()
    assert device(model) == "cpu"
    assert log == [("a", "cpu"), ("a", "meta"), ("a", "cpu")]


def test_the_model_before_goes_first(log):
    first, second, third = (Noted(log, name) for name in "abc")
    _, hook = cpu_offload_with_hook(first, "meta")
    _, hook = cpu_offload_with_hook(second, "meta", prev_module_hook=hook)
    cpu_offload_with_hook(third, "meta", prev_module_hook=hook)
    log.clear()
    x = torch.ones(1, 2)
    first(x)
    second(x)
    second(x)
    third(x)
    assert log == [("a", "meta"), ("a", "cpu"), ("b", "meta"), ("b", "cpu"), ("c", "meta")]
    assert [device(model) for model in (first, second, third)] == ["cpu", "cpu", "meta"]


def test_a_model_that_does_not_fit_goes_back_as_a_whole(log):
    class Large(Noted):
        def to(self, device):
            super().to(device)
            if torch.device(device).type != "cpu" and len(log) < 3:
                self._parameters["bias"] = nn.Parameter(torch.zeros(2))  # the last one did not come
                raise torch.OutOfMemoryError("full")
            return self

    model, _ = cpu_offload_with_hook(Large(log, "a"), "meta")
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        model(torch.ones(1, 2))
    assert log == [("a", "cpu"), ("a", "meta"), ("a", "cpu")]
    assert model(torch.ones(1, 2)).is_meta  # there is room by now


def test_removing_leaves_the_model_where_it_is(log):
    model, hook = cpu_offload_with_hook(Noted(log, "a"), "meta")
    model(torch.ones(1, 2))
    hook.remove()
    assert not hasattr(model, "_hf_hook")
    assert device(model) == "meta"


def test_hooks_that_are_there_are_kept():
    model = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook())
    cpu_offload_with_hook(model, "cpu")
    assert isinstance(model._hf_hook, SequentialHook)


def test_a_model_without_tensors_only_gets_its_inputs():
    model = add_hook_to_module(nn.ReLU(), CpuOffload("meta"))
    assert model(torch.ones(1)).is_meta
    _, hook = cpu_offload_with_hook(nn.ReLU(), "meta")
    following, _ = cpu_offload_with_hook(nn.ReLU(), "meta", prev_module_hook=hook)
    assert following(torch.ones(1)).is_meta


def test_on_the_cpu_nothing_changes():
    model = nn.Linear(2, 2)
    own, x = dict(model.named_parameters()), torch.ones(1, 2)
    expected = model(x)
    cpu_offload_with_hook(model, "cpu")
    assert torch.equal(model(x), expected)
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_the_default_is_the_cpu():
    assert CpuOffload().execution_device == torch.device("cpu")


def test_what_is_no_hook_or_no_device_is_refused_before_the_model_moves(log):
    model = Noted(log, "a")
    with pytest.raises(
        TypeError, match=r"prev_module_hook must be the hook that cpu_offload_with_hook returned.*Noted"
    ):
        cpu_offload_with_hook(model, "cpu", prev_module_hook=model)
    with pytest.raises(DeviceMapError, match="nowhere"):
        cpu_offload_with_hook(model, "nowhere")
    assert log == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    there = torch.accelerator.current_accelerator().type
    _, hook = cpu_offload_with_hook(first)
    cpu_offload_with_hook(second, prev_module_hook=hook)
    own = first.weight
    output = second(first(x))
    assert output.device.type == there
    assert (device(first), device(second)) == ("cpu", there)
    assert first.weight is own
    torch.testing.assert_close(output.cpu(), nn.Linear.forward(second.cpu(), nn.Linear.forward(first, x)))
