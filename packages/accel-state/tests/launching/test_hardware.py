"""Counting devices without torch, on file systems made for the purpose."""

import os

import pytest

from accel_state.errors import ConfigError
from accel_state.launching.hardware import Accelerators, find_accelerators, peer_to_peer_works, physical_cores


def make(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")


@pytest.fixture
def no_darwin(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")


def test_nothing_is_found_where_nothing_is(tmp_path, no_darwin):
    assert find_accelerators({}, tmp_path) == Accelerators()


def test_nvidia_devices(tmp_path):
    make(tmp_path, *(f"dev/nvidia{n}" for n in range(4)), "dev/nvidiactl", "dev/nvidia-uvm")
    assert find_accelerators({}, tmp_path) == Accelerators("cuda", 4, 4, "CUDA_VISIBLE_DEVICES")


def test_a_container_that_shows_fewer_device_files(tmp_path):
    make(tmp_path, "dev/nvidia3", *(f"proc/driver/nvidia/gpus/{n}" for n in range(4)))
    assert find_accelerators({}, tmp_path).count == 1


@pytest.mark.parametrize(
    ("value", "count"),
    [("0", 1), ("0,1", 2), ("3,2,1,0", 4), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,9,1", 1),
     ("GPU-8932f937", 1), ("MIG-a,MIG-b", 2), (" 0 , 1 ", 2)],
)  # fmt: skip
def test_visibility_counts_as_the_cuda_runtime_does(tmp_path, value, count):
    make(tmp_path, *(f"dev/nvidia{n}" for n in range(4)))
    found = find_accelerators({"CUDA_VISIBLE_DEVICES": value}, tmp_path)
    assert (found.count, found.present) == (count, 4)


def test_amd_devices_are_the_nodes_with_compute_units(tmp_path):
    for number, units in enumerate((0, 304, 304)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n")
    assert find_accelerators({}, tmp_path) == Accelerators("rocm", 2, 2, "HIP_VISIBLE_DEVICES")


def test_intel_devices_need_the_compute_runtime(tmp_path, no_darwin):
    make(tmp_path, "sys/class/drm/renderD128/device/vendor")
    (tmp_path / "sys/class/drm/renderD128/device/vendor").write_text("0x8086\n")
    assert find_accelerators({}, tmp_path).count == 0
    make(tmp_path, "usr/lib/x86_64-linux-gnu/libze_loader.so.1")
    assert find_accelerators({}, tmp_path).kind == "xpu"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("dev/davinci0", "npu"),
        ("dev/accel/accel0", "hpu"),
        ("dev/neuron0", "neuron"),
        ("dev/cambricon_dev0", "mlu"),
    ],
)
def test_devices_of_other_vendors(tmp_path, path, kind):
    make(tmp_path, path)
    assert (find_accelerators({}, tmp_path).kind, find_accelerators({}, tmp_path).count) == (kind, 1)


def test_apple_silicon_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert find_accelerators({}, tmp_path) == Accelerators("mps", 1, 1)


def test_the_count_can_be_overridden(tmp_path, no_darwin):
    assert find_accelerators({"ACCEL_DEVICE_COUNT": "3"}, tmp_path).count == 3
    assert find_accelerators({"ACCEL_DEVICE_COUNT": "0"}, tmp_path).kind == "none"
    with pytest.raises(ConfigError, match="ACCEL_DEVICE_COUNT is 'many'"):
        find_accelerators({"ACCEL_DEVICE_COUNT": "many"}, tmp_path)


def test_the_drivers_tool_is_only_asked_where_it_matters(tmp_path, monkeypatch):
    two = Accelerators("cuda", 2, 2)
    monkeypatch.setattr("accel_state.host.nvidia.check_cuda_p2p_ib_support", lambda: False)
    assert not peer_to_peer_works(two, tmp_path)
    make(tmp_path, "proc/driver/nvidia/gpus/0/information")
    information = tmp_path / "proc/driver/nvidia/gpus/0/information"
    information.write_text("Model: NVIDIA H100")
    assert peer_to_peer_works(two, tmp_path)
    information.write_text("Model: NVIDIA GeForce RTX 4090")
    assert not peer_to_peer_works(two, tmp_path)
    assert peer_to_peer_works(Accelerators("cuda", 1, 1), tmp_path)
    assert peer_to_peer_works(Accelerators("npu", 2, 2), tmp_path)


def test_threads_of_one_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for cpu, threads in enumerate(("0-1", "0-1", "2,3", "2,3")):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{threads}\n")
    assert physical_cores(tmp_path) == 2


def test_without_topology_every_allowed_cpu_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert physical_cores(tmp_path) == 3


def test_systems_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert physical_cores(tmp_path) == (os.cpu_count() or 1)
