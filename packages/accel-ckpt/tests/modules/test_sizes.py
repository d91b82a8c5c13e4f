"""Bytes of modules, layers and dtypes."""

import enum

import pytest
import torch
from torch import nn

from accel_ckpt import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)
        self.register_buffer("table", torch.zeros(2), persistent=False)


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
