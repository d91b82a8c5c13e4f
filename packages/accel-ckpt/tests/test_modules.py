"""Helpers for module trees."""

import enum

import pytest
import torch
from torch import nn

from accel_ckpt import (
    StateMismatchError,
    UninitializedTensorError,
    calculate_maximum_sizes,
    check_nothing_on_meta,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        self.register_buffer("table", torch.zeros(2), persistent=False)


def tied(count=2):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for index in range(1, count):
        model[index].weight = model[0].weight
    return model


# ties


def test_find_tied_parameters():
    assert find_tied_parameters(Model()) == []
    assert find_tied_parameters(tied(3)) == [["0.weight", "1.weight", "2.weight"]]
    model = tied()
    model[1].bias = model[2].bias
    assert find_tied_parameters(model) == [["0.weight", "1.weight"], ["1.bias", "2.bias"]]
    model[2].weight = nn.Parameter(model[0].weight.view(2, 2))
    assert len(find_tied_parameters(model)) == 2
    assert find_tied_parameters(model, recurse=False) == []


def test_retie_parameters():
    model = tied()
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    model[0].weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    retie_parameters(model, [["0.weight", "1.weight"], []])
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type == "cpu"
    with torch.device("meta"):
        left = tied()
    before = left[0].weight
    retie_parameters(left, [["0.weight", "1.weight"]])
    assert left[0].weight is before


# tensors


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


# sizes


def test_compute_module_sizes():
    model = Model()
    sizes = compute_module_sizes(model)
    expected = {"linear1.weight": 48, "linear1.bias": 16, "linear1": 64, "table": 8}
    expected["batchnorm.num_batches_tracked"] = 8
    assert {name: sizes[name] for name in expected} == expected
    total = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert sizes[""] == total
    assert compute_module_total_buffer_size(model) == 8 + 4 * 4 * 2 + 8
    assert compute_module_total_buffer_size(nn.Linear(1, 1)) == 0
    with torch.device("meta"):
        assert compute_module_sizes(Model()) == sizes


def test_compute_module_sizes_with_dtypes():
    model = Model()
    half = compute_module_sizes(model, dtype=torch.float16)
    assert half["linear1"] == 32
    assert half["batchnorm.num_batches_tracked"] == 8
    assert compute_module_sizes(model, dtype="float64") == compute_module_sizes(model)
    special = compute_module_sizes(model, dtype="float16", special_dtypes={"linear1.weight": "float32"})
    assert special["linear1"] == 48 + 8


class Kind(enum.Enum):
    FP8 = "fp8"
    INT2 = "int2"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bool, 1 / 8),
        ("int4", 0.5),
        (torch.uint4, 0.5),
        (torch.int1, 1 / 8),
        (torch.uint7, 7 / 8),
        ("int2", 0.25),
        (torch.quint4x2, 0.5),
        (torch.bits1x8, 1 / 8),
        (torch.bits2x4, 0.25),
        (torch.float4_e2m1fn_x2, 0.5),
        (torch.float8_e4m3fn, 1),
        ("bfloat16", 2),
        ("torch.half", 2),
        ("fp8", 1),
        (Kind.FP8, 1),
        (Kind.INT2, 0.25),
    ],
)
def test_dtype_byte_size(dtype, size):
    found = dtype_byte_size(dtype)
    assert found == size
    assert type(found) is type(size)  # so that whole ones can be sizes of tensors


def test_dtype_byte_size_of_all_dtypes():
    kinds = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    below_a_byte = {d for d in kinds if dtype_byte_size(d) < 1}
    assert {d for d in kinds - below_a_byte if dtype_byte_size(d) != d.itemsize} == set()
    assert all(d.itemsize == 1 and dtype_byte_size(d) >= 1 / 8 for d in below_a_byte)
    with pytest.raises(ValueError, match="float7"):
        dtype_byte_size("float7")


def test_sizes_count_half_bytes_up():
    model = nn.Linear(3, 1, bias=False)
    assert compute_module_sizes(model, dtype="int4")["weight"] == 2
    assert compute_module_sizes(model, special_dtypes={"weight": Kind.INT2})[""] == 1


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


def test_sizes_count_what_a_wrapper_holds():
    class Packed(torch.Tensor):  # as quantised tensors are: says bfloat16, holds bytes
        @staticmethod
        def __new__(cls, data, scale):
            return torch.Tensor._make_wrapper_subclass(cls, (data.numel() * 2,), dtype=torch.bfloat16)

        def __init__(self, data, scale):
            self.data_, self.scale = data, scale

        def __tensor_flatten__(self):
            return ["data_", "scale"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Packed(inner["data_"], inner["scale"])

        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: func)

    model = nn.Module()
    model.register_buffer("weight", Packed(torch.ones(8, dtype=torch.uint8), torch.ones(1)))
    assert compute_module_sizes(model)[""] == 8 + 4


def test_sizes_count_a_tied_parameter_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    sizes = compute_module_sizes(model)
    assert (sizes[""], sizes["a"], sizes["b.weight"]) == (36, 36, 0)


def test_largest_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4)), nn.ReLU())
    assert calculate_maximum_sizes(model) == (80 + 24 + 80, (80, ["0", "1.1"]))
    model._no_split_modules = ["Sequential"]
    assert calculate_maximum_sizes(model) == (184, (104, ["1"]))
    assert get_max_layer_size([("p", torch.ones(3)), ("m", model)], {"p": 500}, ()) == (500, ["p"])
    assert get_max_layer_size([], {}, ()) == (0, [])
