"""Hooks on all modules of a model."""

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    DeviceMapError,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)
from accel_ckpt import StateMismatchError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU()
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.act(self.norm(self.linear1(x))))


class Direct(nn.Module):
    """Uses the weights of a submodule that it does not call."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.dense = nn.Linear(5, 5)

    def forward(self, x):
        return nn.functional.linear(self.inner(x), self.dense.weight, self.dense.bias)


@pytest.fixture
def x():
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def hooked(model):
    return {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def on_meta(model):
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name for name, tensor in tensors if tensor.is_meta}


PARAMETERS = {name for name, _ in Model().named_parameters()}
BUFFERS = {name for name, _ in Model().named_buffers()}


def test_execution_device_hooks(model, x):
    mine = ModelHook()
    add_hook_to_module(model.norm, mine)
    attach_execution_device_hook(model, "meta", skip_keys="kept")
    assert hooked(model) == {"", "linear1", "norm", "linear2"}
    assert model.norm._hf_hook is mine
    assert model.linear1._hf_hook.skip_keys == "kept"
    assert on_meta(model) == {name for name in PARAMETERS if not name.startswith("norm.")}


def test_execution_device_hooks_stop_at_preloaded_classes():
    model = Direct()
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Model"])
    assert hooked(model) == {"", "inner", "dense"}


def test_a_module_with_nothing_but_hidden_buffers_gets_no_hook():
    module = nn.Module()
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    attach_execution_device_hook(module, "cpu")
    assert hooked(module) == set()
    module.register_buffer("seen", torch.ones(1))
    attach_execution_device_hook(module, "cpu")
    assert hooked(module) == {""}


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_offloading_every_module(model, x, buffers, mapped):
    expected = model(x)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    weights = values if mapped else None
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=buffers, weights_map=weights)
    assert hooked(model) == {"linear1", "norm", "linear2"}
    assert on_meta(model) == PARAMETERS | (BUFFERS if buffers else set())
    assert torch.equal(model(x), expected)
    remove_hook_from_submodules(model)
    assert on_meta(model) == hooked(model) == set()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_offloading_keeps_the_hooks_that_are_there(model, x):
    class Double(ModelHook):
        def post_forward(self, module, output):
            return output * 2

    add_hook_to_module(model.linear2, Double())
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(model.linear2._hf_hook, SequentialHook)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("classes", [["Direct"], "Direct"])
def test_preloaded_classes_have_all_their_weights_during_forward(x, classes):
    model = Direct().eval()
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=classes)
    assert hooked(model) == {""}
    assert torch.equal(model(x), expected)
    assert on_meta(model) == {name for name, _ in model.named_parameters()}


class Listed(nn.Module):
    """Uses parameters in lists, and attention, whose output layer is never called."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList([nn.ParameterList([torch.ones(4), torch.zeros(4)])])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        scale, shift = self.scales[0]
        return self.attention(x, x, x)[0] * scale + shift


@pytest.mark.parametrize(
    "attach",
    [
        lambda model: attach_align_device_hook(model, "cpu", offload=True),
        lambda model: attach_align_device_hook_on_blocks(
            model, {"": "cpu"}, {"": True}, weights_map=dict(model.state_dict())
        ),
    ],
)
def test_parts_that_are_never_called_come_with_the_module_that_uses_them(attach):
    torch.manual_seed(0)
    model, x = Listed().eval(), torch.randn(1, 3, 4)
    with torch.no_grad():
        expected = model(x)
        attach(model)
        assert on_meta(model) == {name for name, _ in model.named_parameters()}
        assert torch.equal(model(x), expected)
        remove_hook_from_submodules(model)
        assert torch.equal(model(x), expected)


def test_an_offloaded_model_without_own_tensors_gets_its_inputs_on_the_device():
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return x.device.type

    model = Looking()
    attach_align_device_hook_on_blocks(model, {"": "meta"}, {"": True}, weights_map=model.state_dict())
    assert model(torch.ones(1, 3)) == "meta"


def test_ties_hold_between_all_modules(x):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    own = model[0].weight
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True)
    assert model[0].weight is model[1].weight
    assert torch.equal(model(x), expected)
    remove_hook_from_submodules(model)
    assert model[0].weight is model[1].weight is own


def test_one_device_for_all_blocks_is_one_hook(model):
    attach_align_device_hook_on_blocks(model, "meta", skip_keys="kept")
    assert hooked(model) == {""}
    hook = model._hf_hook
    assert (hook.io_same_device, hook.place_submodules, hook.skip_keys) == (True, True, "kept")
    assert on_meta(model) == PARAMETERS | BUFFERS


def test_one_device_and_offload_for_all_blocks(model, x):
    expected = model(x)
    attach_align_device_hook_on_blocks(model, "cpu", offload=True)
    assert on_meta(model) == PARAMETERS
    assert torch.equal(model(x), expected)


def test_blocks_on_devices_of_their_own(model, x):
    devices = {"linear1": "cpu", "norm": "cpu", "linear2": "meta"}
    attach_align_device_hook_on_blocks(model, devices)
    assert on_meta(model) == {"linear2.weight", "linear2.bias"}
    assert hooked(model) == {"", "linear1", "norm", "linear2"}
    assert model._hf_hook.io_same_device
    assert model._hf_hook.execution_device is None
    assert not model.linear1._hf_hook.io_same_device
    seen = []
    model.linear2.register_forward_hook(lambda _, args, output: seen.append(output.device.type))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        model(x)  # it does try to bring the output back, which the meta device cannot
    assert seen == ["meta"]


@pytest.mark.parametrize("entry", ["linear1", ""])
def test_blocks_offloaded_by_name(model, x, entry):
    expected = model(x)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook_on_blocks(model, "cpu", offload={entry: True}, weights_map=weights)
    assert on_meta(model) == {name for name in PARAMETERS if name.startswith(entry)}
    assert torch.equal(model(x), expected)
    hooks = getattr(model._hf_hook, "hooks", [model._hf_hook])
    assert any(hook.io_same_device for hook in hooks)
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected)


def test_blocks_some_resident_some_offloaded(model, x):
    expected = model(x)
    devices = dict.fromkeys(["linear1", "norm", "act", "linear2"], "cpu")
    offload = {"linear1": True, "norm": False, "act": False, "linear2": True}
    attach_align_device_hook_on_blocks(model, devices, offload)
    assert on_meta(model) == {name for name in PARAMETERS if not name.startswith("norm.")}
    assert torch.equal(model(x), expected)
    assert isinstance(model.norm._hf_hook, AlignDevicesHook)
    assert not model.norm._hf_hook.offload


def test_block_inside_a_named_module(x):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    expected = model(x)
    attach_align_device_hook_on_blocks(
        model, {"0.1": "cpu", "0.0": "cpu", "1": "cpu"}, {"0.1": True, "0.0": False, "1": False}
    )
    assert on_meta(model) == {"0.1.weight", "0.1.bias"}
    assert torch.equal(model(x), expected)


def test_a_module_at_two_places_is_offloaded_once(model, x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Sequential(model), nn.Sequential(model, nn.Linear(5, 2))

        def forward(self, x):
            return self.second(x) + self.first(x).sum()

    twice = Twice().eval()
    expected = twice(x)
    attach_align_device_hook(twice, "cpu", offload=True)
    assert torch.equal(twice(x), expected)
    remove_hook_from_submodules(twice)
    assert torch.equal(twice(x), expected)


@pytest.mark.parametrize(
    "attach",
    [
        lambda model, weights: attach_align_device_hook(model, "cpu", True, weights),
        lambda model, weights: attach_align_device_hook_on_blocks(
            model, "cpu", {"linear1": True, "norm": False, "act": False, "linear2": True}, weights
        ),
        lambda model, weights: attach_align_device_hook_on_blocks(
            model, {"linear1": "meta", "linear2": "moon"}, {"linear1": False, "linear2": True}, weights
        ),
    ],
)
def test_all_hooks_or_none(model, x, attach):
    before, expected = ModelHook(), model(x)
    add_hook_to_module(model.linear1, before)
    weights = {name: value for name, value in model.state_dict().items() if name != "linear2.bias"}
    with pytest.raises((StateMismatchError, DeviceMapError)):
        attach(model, weights)
    assert hooked(model) == {"linear1"}
    assert model.linear1._hf_hook is before
    assert not on_meta(model)
    assert torch.equal(model(x), expected)
