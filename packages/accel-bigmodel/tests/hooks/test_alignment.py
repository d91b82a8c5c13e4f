"""Asking whether weights wait elsewhere, borrowing them, collecting them."""

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from accel_ckpt import UninitializedTensorError


class Streams(ModelHook):
    """As an engine marks modules whose weights it moves."""

    offload = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.own


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def offloaded(model):
    attach_align_device_hook(model, "cpu", offload=True)
    return model


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (None, False),
        (ModelHook(), False),
        (AlignDevicesHook("cpu"), False),
        (Streams(), True),
        (SequentialHook(AlignDevicesHook("cpu"), SequentialHook(Streams())), True),
        (SequentialHook(ModelHook(), ModelHook()), False),
    ],
)
def test_has_offloaded_params(hook, expected):
    module = nn.Linear(2, 2)
    if hook is not None:
        add_hook_to_module(module, hook)
    assert has_offloaded_params(module) is expected


def test_what_stands_around_forward_counts_beneath_a_hook_too():
    class Gate:
        offload = True

        def __call__(self, x):
            return x

    module = nn.Linear(2, 2)
    module.forward = Gate()
    assert has_offloaded_params(module)
    add_hook_to_module(module, AlignDevicesHook("cpu"))
    assert has_offloaded_params(module)
    Gate.offload = False
    assert not has_offloaded_params(module)


def test_only_the_module_itself_counts(offloaded):
    assert has_offloaded_params(offloaded)
    assert has_offloaded_params(offloaded.linear)
    assert not has_offloaded_params(nn.Sequential(offloaded))


def test_borrowing_offloaded_weights(offloaded):
    values = offloaded.linear._hf_hook.weights_map
    with align_module_device(offloaded.linear):
        assert torch.equal(offloaded.linear.weight, values["weight"])
        assert offloaded.norm.weight.is_meta
    assert offloaded.linear.weight.is_meta
    with align_module_device(offloaded.linear, "meta"):
        assert offloaded.linear._hf_hook.execution_device == "meta"
    assert offloaded.linear._hf_hook.execution_device == "cpu"


def test_borrowing_from_a_hook_in_a_sequence(model):
    add_hook_to_module(model.linear, AlignDevicesHook("cpu"))
    add_hook_to_module(model.linear, AlignDevicesHook("cpu", offload=True), append=True)
    with align_module_device(model.linear):
        assert not model.linear.weight.is_meta
    assert model.linear.weight.is_meta


def test_borrowing_ends_when_the_block_raises(offloaded, model):
    with pytest.raises(ZeroDivisionError), align_module_device(offloaded.linear, "cpu"):
        raise ZeroDivisionError
    assert offloaded.linear.weight.is_meta
    assert offloaded.linear._hf_hook._borrowed._calls == []


def test_borrowing_inside_a_borrowing(offloaded):
    with align_module_device(offloaded.linear), align_module_device(offloaded.linear):
        pass
    with align_module_device(offloaded.linear):
        with align_module_device(offloaded.linear):
            pass
        assert not offloaded.linear.weight.is_meta
    assert offloaded.linear.weight.is_meta


def test_what_is_not_offloaded_moves_there_and_back(model):
    before = dict(model.linear.named_parameters())
    values = {name: parameter.clone() for name, parameter in before.items()}
    with align_module_device(model.linear, "meta"):
        assert model.linear.weight.is_meta
    with pytest.raises(ZeroDivisionError), align_module_device(model.linear, "meta"):
        raise ZeroDivisionError
    for name, parameter in model.linear.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])
    with align_module_device(model, "meta"):
        assert model.own.is_meta
        assert not model.linear.weight.is_meta


def test_what_is_written_to_resident_weights_stays(model):
    with align_module_device(model.linear, "cpu"), torch.no_grad():
        model.linear.weight.fill_(3)
    assert model.linear.weight.eq(3).all()
    replaced = nn.Parameter(torch.zeros(2, 3))
    with align_module_device(model.linear, "cpu"):
        model.linear.weight = replaced
    assert model.linear.weight is replaced


def test_without_a_device_resident_weights_do_not_move(model):
    with align_module_device(model.linear):
        assert not model.linear.weight.is_meta


def test_weights_that_an_engine_moves_come_back_as_the_very_same_memory(model):
    hook = Streams()
    hook.execution_device = "meta"
    add_hook_to_module(model.linear, hook)
    address = model.linear.weight.data_ptr()
    with align_module_device(model.linear):
        assert model.linear.weight.is_meta
    assert model.linear.weight.data_ptr() == address


def test_weights_that_only_the_hook_of_a_parent_brings_cannot_be_borrowed_here(model):
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    error = pytest.raises(
        UninitializedTensorError, match=r"weight, bias of this Linear have no values \(meta device\)"
    )
    with error, align_module_device(model.linear, "cpu"):
        pass
    with align_module_device(model, "cpu"):
        assert not model.linear.weight.is_meta


def test_the_state_dict_of_an_offloaded_model_has_all_values(model):
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.own.is_meta
    assert not any(hook._calls for hook in [model._hf_hook._borrowed, model.linear._hf_hook._borrowed])


def test_tied_entries_of_the_state_dict_share_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    attach_align_device_hook(model, "cpu", offload=True)
    found = get_state_dict_offloaded_model(model)
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()


def test_a_weight_without_values_is_never_left_out(model):
    model.linear.to("meta")
    with pytest.raises(UninitializedTensorError, match=r"cannot be saved: linear.weight, linear.bias"):
        get_state_dict_offloaded_model(model)


def test_state_dict_from_one_offloaded_module(model):
    expected = model.linear.weight.detach().clone()
    attach_align_device_hook(model, "cpu", offload=True)
    state_dict = {"linear.weight": "", "other.bias": ""}
    assert get_state_dict_from_offload(model.linear, "linear.weight", state_dict) is state_dict
    assert torch.equal(state_dict["linear.weight"], expected)
    assert state_dict.keys() == {"linear.weight", "other.bias"}
    assert state_dict["other.bias"] == ""
    assert get_state_dict_from_offload(model.linear, "linear.weight", {"linear.bias": ""}, "meta")[
        "linear.bias"
    ].is_meta
    own = get_state_dict_from_offload(model, "own", {"own": ""})["own"]
    assert torch.equal(own, torch.ones(2))


def test_state_dict_from_a_resident_module_stays_where_it_is(model):
    found = get_state_dict_from_offload(model.linear, "linear.weight", {"linear.weight": ""}, "meta")
    assert found["linear.weight"].data_ptr() == model.linear.weight.data_ptr()
