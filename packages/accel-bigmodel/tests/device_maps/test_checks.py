from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    DeviceMapError,
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_on_same_device,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    estimate_activations,
    estimate_memory,
    estimate_training,
    estimate_weights,
    explain_device_map,
    infer_auto_device_map,
    load_and_quantize_model,
    load_checkpoint_and_dispatch,
    prepare_pippy,
)
from accel_bigmodel.device_maps.checks import execution_device
from accel_ckpt.modules import devices


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(devices, "device_count", lambda kind: 2 if kind == "cuda" else 0)


def test_a_map_that_covers_everything():
    check_device_map(Model(), {"": "cpu"}, strict=True)
    check_device_map(Model(), {"embed": "cpu", "norm": "disk", "head.weight": "disk"}, strict=True)


@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_a_map_that_misses_something():
    with pytest.raises(
        ValueError, match=r"does not give any device for the following parameters: head\.weight"
    ):
        check_device_map(Model(), {"embed": 0, "norm": 0})
    with pytest.raises(
        DeviceMapError, match=r"norm.running_mean, norm.running_var, norm.num_batches_tracked"
    ):
        check_device_map(Model(), {"embed": 0, "norm.weight": 0, "norm.bias": 0, "head": 0})
    with pytest.raises(DeviceMapError, match=r"embed.weight"):
        check_device_map(Model(), {"embe": 0, "norm": 0, "head": 0, "em": 1, "embed.weigh": 3})


def test_unknown_names():
    given = {"embed": "cpu", "norm": "cpu", "haed": "cpu", "head": "cpu"}
    with pytest.warns(
        UserWarning, match=r"do not match any submodules in the model: 'haed' \(is 'head' meant\?\)"
    ):
        check_device_map(Model(), given)
    with pytest.raises(DeviceMapError, match="'haed'"):
        check_device_map(Model(), given, strict=True)
    for turned in ({0: "embed", "": "cpu"}, {1: "embed", "": "cpu"}):
        with pytest.raises(DeviceMapError, match=r"do not match .*: [01]$"):
            check_device_map(Model(), turned, strict=True)
    with pytest.raises(DeviceMapError, match="and 2 more"):
        check_device_map(Model(), {"": "cpu"} | {f"zz{i}": "cpu" for i in range(10)}, strict=True)


def test_devices_that_are_not_there(two_devices):
    model = Model()
    for device in (
        0,
        1,
        "cuda",
        "cuda:1",
        torch.device("cuda", 0),
        "cpu",
        "disk",
        torch.device("cpu"),
        "meta",
    ):
        check_device_map(model, {"": device}, strict=True)
    with pytest.raises(DeviceMapError, match="puts '' on 2, but this machine has 2 of type cuda"):
        check_device_map(model, {"": 2}, strict=True)
    with pytest.raises(DeviceMapError, match="puts '' on 'xpu:0', but this machine has no xpu device"):
        check_device_map(model, {"": "xpu:0"}, strict=True)
    for wrong in ("gpu", -1, 1.5, None):
        with pytest.raises(DeviceMapError, match=r"is not a device|has 2 of type cuda"):
            check_device_map(model, {"": wrong}, strict=True)


def test_devices_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(devices, "device_count", lambda kind: int(kind == "cpu"))
    with pytest.raises(DeviceMapError, match="puts '' on 0, but this machine has no cuda device"):
        check_device_map(Model(), {"": 0}, strict=True)


def test_execution_devices(two_devices):
    assert execution_device(1) == execution_device("cuda:1") == torch.device("cuda", 1)
    assert execution_device("cuda") == torch.device("cuda", 0)
    for host in ("disk", "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        assert execution_device(host) is None


def test_split_ties(two_devices):
    model = Model()
    model.head.weight = model.embed.weight
    check_device_map(model, {"embed": 0, "norm": 1, "head": 0}, strict=True)
    check_device_map(model, {"embed": "cpu", "norm": "disk", "head": "disk"}, strict=True)
    # Offloaded weights compute on the main device, here 0.
    check_device_map(model, {"embed": "cpu", "norm": 0, "head": 0}, strict=True)
    with pytest.raises(DeviceMapError, match=r"splits tied parameters: embed.weight on 0, head.weight on 1"):
        check_device_map(model, {"embed": 0, "norm": 0, "head": 1}, strict=True)
    with pytest.raises(DeviceMapError, match=r"embed.weight on 'cpu', head.weight on 1"):
        check_device_map(model, {"norm": 0, "embed": "cpu", "head": 1}, strict=True)


@pytest.mark.parametrize("persistent", [True, False])
def test_shared_buffers_that_compute_on_two_devices(two_devices, persistent):
    model = nn.Sequential(nn.Module(), nn.Module(), nn.Sequential(nn.Module()))
    shared = torch.ones(3)
    for owner in (model[0], model[2][0]):
        owner.register_buffer("scale", shared, persistent=persistent)
    for fine in ({"0": 0, "1": 1, "2": 0}, {"0": 0, "1": 1, "2": "cpu"}, {"0": "disk", "1": 1, "2": "cpu"}):
        check_device_map(model, fine, strict=True)
    check_device_map(model, {"0": 0, "1": 1, "2": 1, "2.0.scale": 0}, strict=True)
    for wrong in ({"0": 0, "1": 1, "2": 1}, {"0": 0, "1": 1, "2": 0, "2.0": 1}, {"1": 0, "0": "cpu", "2": 1}):
        with pytest.raises(DeviceMapError, match=r"0.scale on .*, 2.0.scale on 1"):
            check_device_map(model, wrong, strict=True)
    if not persistent:  # a map may omit it: then it is on the main device
        check_device_map(model, {"1": 0, "0": 0}, strict=True)
        with pytest.raises(DeviceMapError, match=r"0.scale on 1, 2.0.scale on None"):
            check_device_map(model, {"1": 0, "0": 1}, strict=True)


def test_check_tied_parameters_on_same_device(caplog):
    tied = [["embed.weight", "head.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(tied, {"embed": 0, "head": 0})
        assert not caplog.text
        check_tied_parameters_on_same_device(tied, {"embed": 0, "": 1})
    assert "Tied parameters are on different devices: {'embed.weight': 0, 'head.weight': 1}" in caplog.text
    with pytest.raises(DeviceMapError, match=r"no device for 'head.weight'"):
        check_tied_parameters_on_same_device(tied, {"embed": 0})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpt2", "the text 'gpt2'"),
        (Model, "the class Model, not an object of it"),
        ({"weight": torch.ones(2)}, "one dict"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto"),
        lambda model: load_checkpoint_and_dispatch(model, "checkpoint", device_map={"": "cpu"}),
        lambda model: dispatch_model(model, {"": "cpu"}),
        cpu_offload,
        lambda model: disk_offload(model, "folder"),
        cpu_offload_with_hook,
        infer_auto_device_map,
        explain_device_map,
        calculate_maximum_sizes,
        estimate_memory,
        estimate_weights,
        estimate_training,
        lambda model: estimate_activations(model, ()),
        prepare_pippy,
        lambda model: load_and_quantize_model(model, None),
    ],
)
def test_what_is_no_model(use, given, said):
    with pytest.raises(TypeError, match=f"^the model is {said};"):
        use(given)
