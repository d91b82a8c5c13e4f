"""Properties of the machine: ports, kernel, CPU affinity, compute capability."""

from __future__ import annotations

import os
import platform
import socket
import types
from collections import namedtuple

import pytest
import torch

from accel_state.clusters.base import Topology
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError
from accel_state.host import system

Uname = namedtuple("Uname", ["system", "release"])


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
def test_old_kernels_are_told(monkeypatch, caplog, name, release, warns):
    monkeypatch.setattr(platform, "uname", lambda: Uname(name, release))
    for rank, expected in ((0, warns), (1, False)):
        caplog.clear()
        with patch_environment(rank=rank, world_size=2):
            system.check_os_kernel()
        assert len(caplog.records) == int(expected)
        assert all(release in message for message in caplog.messages)


def test_loaded_libraries():
    assert system.are_libraries_initialized("sys", "no_such_library", "torch") == ["sys", "torch"]


def test_the_place_that_the_launcher_tells():
    with patch_environment(rank=1, world_size=2, local_rank=1, local_world_size=2):
        assert system.get_cpu_distributed_information() == Topology(1, 2, 1, 2, launcher="torchrun")


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
    assert "CPU cores [0, 1, 2, 3, 8], near GPU 0000:1b:00.0" in capsys.readouterr().out


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
    with pytest.raises(ConfigError, match="local process 2 has no GPU, because there are 2"):
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
