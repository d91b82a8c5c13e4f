from __future__ import annotations

import logging
import math
from types import MappingProxyType, SimpleNamespace

import numpy as np
import psutil
import pytest
from torch import nn

from accel_bigmodel import (
    DeviceMapError,
    available_host_memory,
    explain_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    resolve_device_map,
)
from accel_bigmodel.device_maps import budget
from accel_bigmodel.device_maps.budget import control_group_room

GIB = 2**30


@pytest.fixture
def two_devices(monkeypatch):
    free = {0: 10 * GIB, 1: 5 * GIB}
    integrated = {0: False, 1: False}
    backend = SimpleNamespace(
        mem_get_info=lambda index: (free[index], 16 * GIB),
        get_device_properties=lambda index: SimpleNamespace(is_integrated=integrated[index]),
    )
    monkeypatch.setattr(budget, "default_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(budget, "device_count", lambda kind: 2)
    monkeypatch.setattr(budget, "accelerator_module", lambda kind: backend)
    monkeypatch.setattr(budget, "available_host_memory", lambda: 20 * GIB)
    return SimpleNamespace(free=free, integrated=integrated, backend=backend)


def test_default(two_devices):
    assert get_max_memory() == {0: 10 * GIB, 1: 5 * GIB, "cpu": 20 * GIB}
    two_devices.integrated[1] = True
    assert get_max_memory() == {0: 10 * GIB, 1: 5 * GIB}


def test_default_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(budget, "default_device", lambda: SimpleNamespace(type="cpu"))
    monkeypatch.setattr(budget, "available_host_memory", lambda: 7)
    assert get_max_memory() == {"cpu": 7}
    monkeypatch.setattr(budget, "default_device", lambda: SimpleNamespace(type="mps"))
    assert get_max_memory() == {"mps": 7}


def test_a_device_that_cannot_be_asked_is_left_out_aloud(two_devices, monkeypatch, caplog):
    def mem_get_info(index):
        if index == 0:
            raise RuntimeError("device is in exclusive use")
        return 3, 4

    monkeypatch.setattr(two_devices.backend, "mem_get_info", mem_get_info)
    with caplog.at_level(logging.WARNING):
        assert get_max_memory() == {1: 3, "cpu": 20 * GIB}
    assert "cuda:0 is left out" in caplog.text
    assert "exclusive use" in caplog.text


def test_sizes_and_order(two_devices):
    given = {"disk": "2GB", "cpu": "1GiB", 1: 5.5, 0: 100}
    assert list(get_max_memory(given).items()) == [(0, 100), (1, 5), ("cpu", GIB), ("disk", 2 * 10**9)]
    assert get_max_memory(MappingProxyType({"cpu": "1GiB"})) == {"cpu": GIB}
    assert get_max_memory({0: np.int64(7), "cpu": np.float32(2.5)}) == {0: 7, "cpu": 2}


def test_sizes_become_bytes_in_the_callers_dictionary(two_devices):
    """As transformers needs: from_pretrained(device_map="auto", max_memory={"cpu": "60KB"}) reads them there."""
    given = {"disk": "2GB", "cpu": "60KB", 1: 5.5, 0: 100}
    assert get_max_memory(given, reserve={"cpu": 1})["cpu"] == 59_999
    assert list(given.items()) == [("disk", 2 * 10**9), ("cpu", 60_000), (1, 5.5), (0, 100)]
    wrong = {"cpu": "60KB", "disk": "much"}
    with pytest.raises(DeviceMapError, match="much"):
        get_max_memory(wrong)
    with pytest.raises(DeviceMapError, match="keep 100000 bytes free"):
        get_max_memory(wrong | {"disk": 0}, reserve={"cpu": "100KB"})
    assert wrong == {"cpu": "60KB", "disk": "much"}


def test_other_functions_leave_the_callers_dictionary_alone(two_devices):
    given = {0: "1KB", "cpu": "60KB"}
    model = nn.Linear(4, 4)
    infer_auto_device_map(model, given)
    get_balanced_memory(model, given)
    explain_device_map(model, "auto", given)
    assert given == {0: "1KB", "cpu": "60KB"}


def test_a_device_without_a_limit(two_devices):
    given = {0: 10, "cpu": float("inf")}
    assert get_max_memory(given) == {0: 10, "cpu": math.inf}
    assert get_max_memory(given, reserve={"cpu": 5}) == {0: 10, "cpu": math.inf}
    model = nn.Linear(4, 4)
    for mode in ("auto", "sequential", "balanced_low_0"):
        assert resolve_device_map(model, mode, given) == {"": "cpu"}
        assert "unlimited" not in str(explain_device_map(model, mode, given).problems)
        unlimited, large = ({0: size, 1: size} for size in (math.inf, 10**15))
        assert resolve_device_map(model, mode, unlimited) == resolve_device_map(model, mode, large)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"cuda:0": 1}, "'cuda:0'"),
        ({-1: 1}, "-1"),
        ({True: 1}, "True"),
        ({"cpu": float("-inf")}, r"max_memory\['cpu'\].*-inf"),
        ({"cpu": float("nan")}, r"max_memory\['cpu'\].*nan"),
        ({"cpu": None}, r"max_memory\['cpu'\].*None"),
        ("10GB", r"'10GB'; give bytes or sizes by device"),
        ({0: -5}, r"max_memory\[0\].*negative"),
        ({"cpu": "much"}, r"max_memory\['cpu'\].*'much'"),
    ],
)
def test_bad_budgets(given, word):
    with pytest.raises(DeviceMapError, match=word):
        get_max_memory(given)


def test_devices_of_another_machine_are_announced(monkeypatch, caplog):
    monkeypatch.setattr(budget, "_accelerators", lambda: 1)
    with caplog.at_level(logging.WARNING):
        assert get_max_memory({0: 1, 3: 1}) == {0: 1, 3: 1}
    assert "accelerators 3" in caplog.text


def test_reserve(two_devices):
    assert get_max_memory({0: 100, 1: 50, "cpu": 30}, reserve=20) == {0: 80, 1: 30, "cpu": 30}
    assert get_max_memory({0: 100, "cpu": 30}, reserve={"cpu": "10B", 0: 1}) == {0: 99, "cpu": 20}
    assert get_max_memory({"cpu": 30, "disk": 30}, reserve=10) == {"cpu": 20, "disk": 30}
    assert get_max_memory(reserve="1GiB")[0] == 9 * GIB
    # Budgets of 0 exclude devices.
    assert get_max_memory({0: 0, 1: 50}, reserve=20) == {0: 0, 1: 30}
    assert get_max_memory({0: 0, "cpu": 50}, reserve=20) == {0: 0, "cpu": 30}
    with pytest.raises(DeviceMapError, match="keep 60 bytes free on 1, which has only 50"):
        get_max_memory({0: 100, 1: 50}, reserve=60)
    with pytest.raises(DeviceMapError, match="names 7, which have no budget; the devices with one are 0"):
        get_max_memory({0: 100}, reserve={7: 60})
    with pytest.raises(DeviceMapError, match=r"reserve: .*negative"):
        get_max_memory({0: 100}, reserve=-1)
    with pytest.raises(DeviceMapError, match=r"reserve: .*inf"):
        get_max_memory({0: math.inf}, reserve=math.inf)


# control groups

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "35 31 0:32 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
UNLIMITED_V1 = 9223372036854771712


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v1(folder, limit, used, inactive):
    at = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def v2(folder, limit, used, inactive, high="max"):
    at = f"sys/fs/cgroup{folder}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.high": f"{high}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


def test_no_control_groups(tmp_path):
    assert control_group_room(tmp_path) == []


def test_version_1(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "3:cpu:/job\n2:memory:/job\n", "proc/self/mountinfo": V1_MOUNT})
    write(tmp_path, v1("/job", 1000, 700, 50) | v1("", UNLIMITED_V1, 5000, 0))
    assert min(control_group_room(tmp_path)) == 350


def test_version_2_and_its_parents(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/slice/job\n", "proc/self/mountinfo": V2_MOUNT})
    write(tmp_path, v2("/slice/job", "max", 700, 50) | v2("/slice", 2000, 1500, 100))
    assert control_group_room(tmp_path) == [600]
    write(tmp_path, v2("/slice/job", 1000, 700, 50, high=800))
    assert sorted(control_group_room(tmp_path)) == [150, 600]
    write(tmp_path, v2("/slice/job", 1000, 1200, 50))
    assert min(control_group_room(tmp_path)) == 0


def test_both_versions_at_once(tmp_path):
    mounts = V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    write(tmp_path, {"proc/self/cgroup": "2:cpu,memory:/a\n0::/b\n", "proc/self/mountinfo": mounts})
    write(tmp_path, v1("/a", 1000, 0, 0) | v2("/unified/b", 900, 0, 0))
    assert sorted(control_group_room(tmp_path)) == [900, 1000]


def test_a_container_that_is_told_a_path_from_outside(tmp_path):
    mount = V1_MOUNT.replace("0:32 / ", "0:32 /docker/abc ")
    write(tmp_path, {"proc/self/cgroup": "2:memory:/docker/abc\n", "proc/self/mountinfo": mount})
    write(tmp_path, v1("", 1000, 100, 0))
    assert control_group_room(tmp_path) == [900]
    write(tmp_path, {"proc/self/cgroup": "2:memory:/elsewhere\n"})
    assert control_group_room(tmp_path) == [900]


def test_available_host_memory_is_the_smaller(monkeypatch):
    monkeypatch.setattr(budget, "control_group_room", list)
    machine = psutil.virtual_memory().total
    assert 0 < available_host_memory() <= machine
    monkeypatch.setattr(budget, "control_group_room", lambda: [17, 5])
    assert available_host_memory() == 5
