"""Tensors of a module are listed, and set one by one."""

import pytest
import torch
from torch import nn

from accel_ckpt import (
    StateMismatchError,
    UninitializedTensorError,
    check_nothing_on_meta,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accel_ckpt.modules.tensors import check_is_module, set_data


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        self.register_buffer("table", torch.zeros(2), persistent=False)


def test_named_module_tensors():
    model = Model()
    assert [n for n, _ in named_module_tensors(model)] == ["table"]
    assert [n for n, _ in named_module_tensors(model.linear1)] == ["weight", "bias"]
    assert [n for n, _ in named_module_tensors(model.batchnorm, include_buffers=False)] == ["weight", "bias"]
    names = [n for n, _ in named_module_tensors(model, recurse=True)]
    assert names == [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
    outer = nn.Sequential(model)
    names = {n for n, _ in named_module_tensors(outer, recurse=True, remove_non_persistent=True)}
    assert names == set(outer.state_dict())


def test_get_non_persistent_buffers():
    outer = nn.Sequential(Model())
    assert get_non_persistent_buffers(outer) == set()
    assert get_non_persistent_buffers(outer, recurse=True) == {"table"}
    assert get_non_persistent_buffers(outer, recurse=True, fqns=True) == {"0.table"}


def test_set_module_tensor_from_meta():
    with torch.device("meta"):
        model = Model()
    model.linear1.weight.requires_grad_(False)
    model.linear1.weight.tag = "x"
    value = torch.randn(4, 3)
    set_module_tensor_to_device(model, "linear1.weight", "cpu", value=value)
    assert torch.equal(model.linear1.weight, value)
    assert not model.linear1.weight.requires_grad
    assert model.linear1.weight.tag == "x"
    set_module_tensor_to_device(model, "batchnorm.running_mean", "cpu", value=torch.ones(4))
    assert torch.equal(model.batchnorm.running_mean, torch.ones(4))
    set_module_tensor_to_device(model, "linear1.weight", "meta")
    assert model.linear1.weight.device.type == "meta"
    with pytest.raises(UninitializedTensorError, match=r"'linear1\.weight' is on the meta device"):
        set_module_tensor_to_device(model, "linear1.weight", "cpu")


def test_set_module_tensor_dtypes():
    model = Model()
    set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(4, 3, dtype=torch.float64))
    assert model.linear1.weight.dtype == torch.float32
    set_module_tensor_to_device(model, "linear1.weight", "cpu", dtype="float16")
    assert model.linear1.weight.dtype == torch.float16
    set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(4, 3, dtype=torch.int8))
    assert model.linear1.weight.dtype == torch.int8
    set_module_tensor_to_device(model, "batchnorm.num_batches_tracked", "cpu", dtype=torch.float16)
    assert model.batchnorm.num_batches_tracked.dtype == torch.int64


def test_set_module_tensor_errors():
    model = Model()
    with pytest.raises(StateMismatchError, match=r"the shape \(4, 3\), but the value has \(3,\)"):
        set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(3))
    with pytest.raises(AttributeError, match="no parameter or buffer 'weigth'"):
        set_module_tensor_to_device(model, "linear1.weigth", "cpu")
    with pytest.raises(AttributeError, match="linear9"):
        set_module_tensor_to_device(model, "linear9.weight", "cpu")
    model.linear1.bias = None
    with pytest.raises(AttributeError, match="registered as None"):
        set_module_tensor_to_device(model, "linear1.bias", "cpu")


def test_tied_tensors_exist_once_per_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    value = torch.randn(2, 2)
    shared = {}
    for name in ("0.weight", "1.weight"):
        set_module_tensor_to_device(
            model, name, "cpu", value=value, dtype=torch.float64, tied_params_map=shared
        )
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_check_nothing_on_meta():
    check_nothing_on_meta(Model())
    with torch.device("meta"):
        model = Model()
    with pytest.raises(UninitializedTensorError, match=r"linear1\.weight.*No checkpoint holds table"):
        check_nothing_on_meta(model)


def test_a_parameter_over_a_tensor_subclass_is_placed():
    class Tagged(torch.Tensor):
        """As quantised tensors are: of a class that takes other arguments than a parameter does."""

        def __new__(cls, data, *, tag):
            return data.as_subclass(cls)

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(Tagged(torch.ones(2, 2), tag=1), requires_grad=False)
    assert type(model.weight) is Tagged
    set_module_tensor_to_device(model, "weight", "meta")
    assert type(model.weight) is Tagged
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_meta
    assert not model.weight.requires_grad


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Model, "the class Model, not an object of it"),
        ("org/name", "the text 'org/name'; only checkpoints can be given by name"),
        ({"weight": torch.ones(1)}, "one dict"),
    ],
)
def test_what_is_no_module(given, told):
    with pytest.raises(TypeError, match=told):
        check_is_module(given)


def test_a_tensor_without_values_is_named_with_what_fills_it():
    with torch.device("meta"):
        linear = nn.Linear(2, 2)
    with pytest.raises(UninitializedTensorError, match=r"weight, bias; load their checkpoint first$"):
        check_nothing_on_meta(linear)
    model = Model()
    model.table = model.table.to("meta")
    with pytest.raises(UninitializedTensorError, match="No checkpoint holds table") as told:
        check_nothing_on_meta(model)
    assert "load their checkpoint" not in str(told.value)


def test_row_statistics_are_kept_with_the_weights_they_scale():
    model = nn.Linear(3, 2)
    statistics = torch.tensor([1.0, 2.0])
    value = torch.ones(2, 3, dtype=torch.int8)
    set_module_tensor_to_device(model, "weight", "cpu", value=value, fp16_statistics=statistics)
    assert torch.equal(model.weight.SCB, statistics)
    assert not model.weight.requires_grad  # integers have no gradients


@pytest.mark.parametrize("allowed", [True, False])
def test_other_data_for_the_same_object(monkeypatch, allowed):
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda tensor, data: allowed)

    class Marked(nn.Parameter):
        pass

    weight = Marked(torch.zeros(2))
    weight.mark = "kept"
    weight.grad = torch.ones(2)
    with torch.no_grad():
        weight.add_(1)
    version, data = weight._version, torch.full((2,), 7.0)
    held = [weight]
    set_data(weight, data)
    assert held[0] is weight
    assert (type(weight), weight.mark, weight.requires_grad) == (Marked, "kept", True)
    assert weight.data_ptr() == data.data_ptr()
    assert weight._version == version
    assert torch.equal(weight.grad, torch.ones(2))
    buffer = torch.zeros(2)
    set_data(buffer, data)
    assert buffer.data_ptr() == data.data_ptr()
    assert type(data) is torch.Tensor
    assert torch.equal(data, torch.full((2,), 7.0))


def test_a_graph_that_has_saved_a_tensor_of_a_device_that_refuses(monkeypatch):
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda tensor, data: False)
    weight = nn.Parameter(torch.zeros(2))
    graph = weight * weight
    with pytest.raises(RuntimeError):
        set_data(weight, torch.ones(2))
    assert graph.requires_grad
    assert torch.equal(weight, torch.zeros(2))
