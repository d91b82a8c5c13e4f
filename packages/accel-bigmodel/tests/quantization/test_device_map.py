from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    BnbQuantizationConfig,
    DeviceMapError,
    QuantizationError,
    TorchAoQuantizationConfig,
    get_quantized_model_device_map,
    init_empty_weights,
)
from accel_bigmodel.quantization.device_map import PartDevices, check_sizes
from accel_bigmodel.quantization.selection import SelectedLayer

INT8 = TorchAoQuantizationConfig("int8", skip_modules=["c"])


def model():
    return nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "abc"})


def test_the_longest_name_counts():
    places = PartDevices({"": "cpu", "a.b": "meta", "a": "cpu"})
    assert [places.of(name).type for name in ("x", "a.c.weight", "a.b", "a.b.weight", "a.bc")] == [
        "cpu", "cpu", "meta", "meta", "cpu",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        (None, {"": "cpu"}),
        ("cpu", {"": "cpu"}),
        (torch.device("cpu"), {"": torch.device("cpu")}),
        ({"a": "cpu", "b": "cpu", "c": "cpu"}, {"a": "cpu", "b": "cpu", "c": "cpu"}),
        ("auto", {"": "cpu"}),
        ("sequential", {"": "cpu"}),
    ],
)
def test_what_stands_for_a_map(device_map, expected):
    if device_map is None and torch.accelerator.is_available():
        expected = {"": 0}
    memory = {"cpu": "1GB"}
    assert get_quantized_model_device_map(model(), INT8, device_map, max_memory=memory) == expected


@pytest.mark.parametrize("place", ["cuda:77", "nonsense", 99])
def test_a_device_that_is_not_there(place):
    with pytest.raises(DeviceMapError, match=str(place)):
        get_quantized_model_device_map(model(), INT8, {"": place})


def test_a_map_that_leaves_something_out():
    with pytest.raises(DeviceMapError, match=r"b\.weight, c\.weight"):
        get_quantized_model_device_map(model(), INT8, {"a": "cpu"})


@pytest.mark.parametrize("device_map", [{"a": "meta", "b": "cpu", "c": "cpu"}, {"": "cpu", "b": "disk"}])
def test_quantised_layers_do_not_wait_elsewhere(device_map):
    config = TorchAoQuantizationConfig("int8", skip_modules=["a", "c"])
    with pytest.raises(
        QuantizationError, match=r"b: torchao int8 weights on the device 'offloaded': .*skip_modules"
    ):
        get_quantized_model_device_map(model(), config, device_map)


def test_an_inferred_map_counts_quantised_sizes():
    """Two layers of 4096 weights in 8 bits, and one of 16384 bytes that is kept in float32."""
    config = TorchAoQuantizationConfig("int8", torch_dtype="fp32", skip_modules=["c"])
    with init_empty_weights():
        empty = model()
    need = 2 * 4096 + 4 * 4096
    find = get_quantized_model_device_map
    assert find(empty, config, "sequential", {"cpu": need}) == {"": "cpu"}
    with pytest.raises(QuantizationError, match="b: torchao int8 weights on the device 'offloaded'"):
        find(empty, config, "sequential", {"cpu": need - 1})


def test_scales_are_counted():
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32", skip_modules=["c"])
    need = int((2 * 2048 + 4 * 4096) * 1.125) + 1
    find = get_quantized_model_device_map
    assert find(model(), config, "auto", {"cpu": need}) == {"": "cpu"}
    with pytest.raises(QuantizationError, match="b: bitsandbytes fp4 weights on the device 'offloaded'"):
        find(model(), config, "auto", {"cpu": need - 100})


@pytest.mark.parametrize(
    ("config", "overhead"),
    [
        (BnbQuantizationConfig(load_in_8bit=True), 0),
        (BnbQuantizationConfig(load_in_4bit=True), 0.125),
        (BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True), 0.03173828125),
        (TorchAoQuantizationConfig("int4", group_size=32), 0.25),
        (TorchAoQuantizationConfig("int4", group_size=128, torch_dtype="fp32"), 0.125),
        (TorchAoQuantizationConfig("float8"), 0),
    ],
)
def test_bytes_of_scales(config, overhead):
    assert config.overhead == overhead


class Engine:
    def why_not(self, layer, device):
        return "is too large" if layer.in_features > 4 else None


def test_all_layers_that_do_not_fit_are_named():
    layers = [SelectedLayer(nn.Linear(size, 2), (f"l{size}",)) for size in (2, 5, 6)]
    places = PartDevices({"": "cpu"})
    with pytest.raises(
        QuantizationError, match=r"l5 is too large; l6 is too large\. .*skip_modules.*\['l5', 'l6'\]"
    ):
        check_sizes(layers, places, Engine(), INT8)
    check_sizes(layers[:1], places, Engine(), INT8)
