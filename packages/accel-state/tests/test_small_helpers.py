"""Helpers for plain objects, the machine, NVIDIA's tool, layers and constants."""

from __future__ import annotations

import functools
import os
import platform
import socket
import stat
import sys
import types
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn

from accel_state import constants
from accel_state.compat import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr
from accel_state.config.sections.fsdp import FSDP_SHARDING_STRATEGIES
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, DeviceError
from accel_state.host import nvidia, system
from accel_state.host.devices import get_current_device_type
from accel_state.module_trees import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, get_module_children_bottom_up
from accel_state.world.clusters.base import Topology

Uname = namedtuple("Uname", ["system", "release"])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (3 * 2**30, "3.0 GB"),
        (2**60, "1024.0 PB"),
    ],
)
def test_bytes_for_people(size, text):
    assert convert_bytes(size) == text


def test_pretty_names():
    assert get_pretty_name(nn.Linear) == "Linear"
    assert get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert get_pretty_name(test_pretty_names) == "test_pretty_names"
    assert get_pretty_name(nn.Linear.forward) == "Linear.forward"
    assert get_pretty_name(functools.partial(print)) == "partial"


def test_merging():
    destination = {"a": {"x": 1, "y": 2}, "b": 3}
    merged = merge_dicts({"a": {"y": 5, "z": {"deep": 6}}, "c": [7]}, destination)
    assert merged is destination
    assert merged == {"a": {"x": 1, "y": 5, "z": {"deep": 6}}, "b": 3, "c": [7]}


def test_dotted_attributes():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.1.weight")


def test_a_free_port_is_free():
    port = system.get_free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("name", "release", "warns"),
    [
        ("Linux", "5.4.0-1-generic", True),
        ("Linux", "4.19", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0-13-amd64", False),
        ("Linux", "unknown", False),
        ("Darwin", "1.0.0", False),
    ],
)
def test_old_kernels_are_told(monkeypatch, name, release, warns):
    monkeypatch.setattr(platform, "uname", lambda: Uname(name, release))
    for rank, expected in ((0, warns), (1, False)):
        with patch_environment(rank=rank, world_size=2), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            system.check_os_kernel()
        assert len(said) == int(expected)
        assert all(release in str(warning.message) for warning in said)


def test_loaded_libraries():
    assert system.are_libraries_initialized("sys", "no_such_library", "torch") == ["sys", "torch"]


def test_the_place_that_the_launcher_tells():
    with patch_environment(rank=1, world_size=2, local_rank=1, local_world_size=2):
        assert system.get_cpu_distributed_information() == Topology(1, 2, 1, 2, launcher="torchrun")


def test_the_kind_of_device_here():
    kind, world = get_current_device_type()
    if not torch.accelerator.is_available():
        assert (kind, world) == ("cuda", "MULTI_GPU")
    else:
        assert kind == torch.accelerator.current_accelerator().type


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two simulated GPUs with the processors that Linux reports for them."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot pin processes to processors")
    set_to = []
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: set_to.append(processors))
    monkeypatch.setattr(system, "_PCI_DEVICES", tmp_path)
    near = tmp_path / "0000:1b:00.0" / "local_cpulist"
    near.parent.mkdir()
    near.write_text("0-3,8,20-23\n")
    return near, set_to


def test_a_process_runs_next_to_its_gpu(gpus, capsys):
    _, set_to = gpus
    system.override_numa_affinity(1, verbose=True)
    assert set_to == [{0, 1, 2, 3, 8}]
    assert "processors [0, 1, 2, 3, 8], next to 0000:1b:00.0" in capsys.readouterr().out


def test_a_process_is_pinned_once(gpus, capsys):
    system.set_numa_affinity.cache_clear()
    for _ in range(3):
        system.set_numa_affinity(0)
    assert len(gpus[1]) == 1
    assert capsys.readouterr().out == ""
    system.set_numa_affinity.cache_clear()


def test_nothing_near_is_nothing_done(gpus):
    near, set_to = gpus
    near.write_text("64-127\n")
    system.override_numa_affinity(0)
    near.unlink()
    system.override_numa_affinity(0)
    assert set_to == []


def test_a_gpu_that_is_not_there(gpus):
    with pytest.raises(ConfigError, match="no GPU 2, only 2"):
        system.override_numa_affinity(2)


def test_without_a_gpu_affinity_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    system.override_numa_affinity(0)
    assert not system.check_cuda_fp8_capability()


@pytest.mark.parametrize(("capability", "answer"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_needs_a_capability(monkeypatch, capability, answer):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert system.check_cuda_fp8_capability() is answer


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """A simulated nvidia-smi."""
    if sys.platform == "win32":
        pytest.skip("the simulated tool is a shell script")

    def make(names, driver, code=0):
        tool = tmp_path / "nvidia-smi"
        listed, drivers = "\n".join(names), "\n".join([driver] * len(names))
        tool.write_text(
            f'#!/bin/sh\ncase "$1" in *name*) echo "{listed}";; *) echo "{drivers}";; esac\nexit {code}\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


@pytest.mark.parametrize(
    ("names", "driver", "answer"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.54.03", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.54.03", True),
        (["NVIDIA A100", "NVIDIA A100"], "535.54.03", True),
    ],
)
def test_cards_that_cannot_talk_to_each_other(smi, names, driver, answer):
    smi(names, driver)
    assert nvidia.get_gpu_info() == (names, len(names))
    assert nvidia.get_driver_version() == driver
    assert nvidia.check_cuda_p2p_ib_support() is answer


def test_nvidia_smi_missing_or_failing(smi):
    assert nvidia.check_cuda_p2p_ib_support()
    with pytest.raises(DeviceError, match="nvidia-smi is not on the PATH"):
        nvidia.get_gpu_info()
    smi([], "")
    with pytest.raises(DeviceError, match="lists no GPU"):
        nvidia.get_driver_version()
    smi(["x"], "1", code=9)
    with pytest.raises(DeviceError, match="--query-gpu=name failed"):
        nvidia.get_gpu_info()


def test_modules_come_before_their_parents():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Linear(2, 2), shared)
    named = get_module_children_bottom_up(model, return_fqns=True)
    names = [name for name, _ in named]
    assert sorted(names) == sorted(name for name, _ in model.named_modules())
    assert names[-1] == ""
    for name in names:
        assert all(names.index(child) <= names.index(name) for child in names if child.startswith(name))
    assert get_module_children_bottom_up(model) == [module for _, module in named]


def test_modules_stand_in_the_order_in_which_they_are_registered():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())
    # what accelerate 1.15 gives
    expected = ["0", "1.0", "1.1", "1", "2", ""]
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == expected


def test_layers_that_can_be_upcast():
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    assert all(issubclass(layer, nn.Module) for layer in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)


def test_names_of_files():
    assert constants.SAFE_WEIGHTS_NAME == "model.safetensors"
    assert constants.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"
    assert constants.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-1") == "model-1.safetensors"
    assert constants.WEIGHTS_NAME == "pytorch_model.bin"
    assert constants.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert constants.WEIGHTS_PATTERN_NAME.format(suffix="") == constants.WEIGHTS_NAME
    assert constants.PROFILE_PATTERN_NAME.format(suffix=0) == "profile_0.json"
    assert (constants.OPTIMIZER_NAME, constants.SCHEDULER_NAME) == ("optimizer", "scheduler")
    assert (constants.SCALER_NAME, constants.RNG_STATE_NAME) == ("scaler.pt", "random_states")


def test_lists_of_choices_agree_with_the_schema():
    assert tuple(constants.FSDP_SHARDING_STRATEGY) == FSDP_SHARDING_STRATEGIES


def test_torchruns_options_are_torchruns():
    from torch.distributed.run import get_args_parser

    known = {
        option.lstrip("-").replace("-", "_")
        for action in get_args_parser()._actions
        for option in action.option_strings
    }
    assert set(constants.TORCH_LAUNCH_PARAMS) <= known
