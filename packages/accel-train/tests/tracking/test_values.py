"""Values of a loop become plain numbers."""

import enum
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_train import ArgumentTypeError, OptionError
from accel_train.tracking.values import flat, plain, plain_step, split_numbers, storable


def test_tensors_and_numpy_values_become_numbers_of_their_kind():
    values = {
        "float": torch.tensor(0.5),
        "another": torch.tensor([0.25]),
        "whole": torch.tensor(2**40 + 1),
        "truth": torch.tensor(True),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "grad": torch.tensor(3.0, requires_grad=True) * 2,
        "np": np.float32(0.125),
        "np_int": np.int64(7),
        "np_array": np.array([4.0]),
        "plain": 0.1,
        "text": "hello",
        "nested": {"loss": torch.tensor(9.0)},
    }
    copied = plain(values)
    assert copied == {
        "float": 0.5, "another": 0.25, "whole": 2**40 + 1, "truth": True, "half": 1.5, "grad": 6.0, "np": 0.125,
        "np_int": 7, "np_array": 4.0, "plain": 0.1, "text": "hello", "nested": {"loss": 9.0},
    }  # fmt: skip
    kinds = (bool, int, float, str, dict)
    assert [type(value) for value in copied.values()] == [
        next(kind for kind in kinds if isinstance(value, kind)) for value in copied.values()
    ]
    assert list(copied) == list(values), "in the order given"
    assert isinstance(values["float"], torch.Tensor), "the script's dictionary is its own"


def test_other_values_stay_the_objects_that_they_are():
    histogram, array, thing = torch.arange(3), np.arange(3), object()
    copied = plain({"histogram": histogram, "array": array, "thing": thing, "text": np.str_("a")})
    assert copied["histogram"] is histogram
    assert copied["array"] is array
    assert copied["thing"] is thing
    assert copied["text"] == "a"


def test_one_copy_to_the_host_for_all_tensors_of_a_kind(monkeypatch):
    """On a device each copy waits for it; here the CPU plays the device, and each operation is counted."""
    done = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            done.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr("accel_train.tracking.values._is_on_host", lambda tensor: False)
    values = {f"loss_{i}": torch.full([1] * (i % 3), float(i), requires_grad=True) for i in range(20)}
    nested = {"inner": {"whole": torch.tensor(2**40 + 1), "truth": torch.tensor(True)}, "text": "a"}
    with Counting():
        copied = plain(values | nested)
    expected = {f"loss_{i}": float(i) for i in range(20)}
    assert copied == expected | {"inner": {"whole": 2**40 + 1, "truth": True}, "text": "a"}
    assert list(copied) == [*values, "inner", "text"]
    assert done.count(torch.ops.aten.stack) == 3, "one for each dtype"
    waits = {torch.ops.aten.item, torch.ops.aten._local_scalar_dense, torch.ops.aten._to_copy}
    assert not waits & set(done), "tolist() is the only copy, and reads the memory of the stack"


@pytest.mark.gpu
def test_tensors_on_a_device():
    device = torch.accelerator.current_accelerator()
    values = {f"loss_{i}": torch.tensor(float(i), device=device) for i in range(5)}
    assert plain(values) == {f"loss_{i}": float(i) for i in range(5)}


def test_a_value_that_is_in_parts_on_several_ranks():
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()], run_check=False)
        assert plain({"loss": whole}) == {"loss": 2.0}
        part = DTensor.from_local(torch.tensor(2.0), mesh, [Partial()], run_check=False)
        with pytest.raises(
            OptionError, match=r"'loss', a DTensor with the placements .* 'loss'.full_tensor\(\)"
        ):
            plain({"loss": part})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("step", [3, torch.tensor(3), np.int64(3), 3.0, np.float64(3)])
def test_a_step_is_an_int(step):
    assert plain_step(step) == 3
    assert type(plain_step(step)) is int


@pytest.mark.parametrize("step", ["3", 1.5, [3], torch.ones(2)])
def test_a_step_that_is_none(step):
    with pytest.raises(ArgumentTypeError, match="step takes a whole number, got"):
        plain_step(step)


def test_no_step():
    assert plain_step(None) is None


def test_nested_names_are_joined():
    assert flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b/c": 2, "b/d/e": 3}


def test_numbers_are_told_from_the_rest():
    assert split_numbers({"a": 1, "b": {"c": 0.5, "d": "text"}, "e": None}) == (
        {"a": 1, "b/c": 0.5},
        ["b/d", "e"],
    )


def test_a_configuration_that_any_engine_can_write():
    color = enum.Enum("Color", ["RED"])
    assert storable(
        {
            "path": Path("a/b"),
            "dtype": torch.bfloat16,
            "color": color.RED,
            "tuple": (1, np.float32(0.5), None),
            "tensor": torch.tensor(2),
            "nested": {1: {"set": {3}}},
        }
    ) == {
        "path": "a/b", "dtype": "torch.bfloat16", "color": "Color.RED", "tuple": [1, 0.5, None], "tensor": 2,
        "nested": {"1": {"set": [3]}},
    }  # fmt: skip
