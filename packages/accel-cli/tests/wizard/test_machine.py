"""What is found on this machine, with a simulated nvidia-smi and a simulated /sys."""

import os

import pytest

from accel_cli.wizard.machine import describe, detect


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    return tmp_path


def smi(folder, lines):
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines))
    tool.chmod(0o755)


def test_names_and_memory_of_gpus(root):
    (root / "dev").mkdir()
    for number in range(3):
        (root / f"dev/nvidia{number}").touch()
    smi(root, ["NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA GB10, [N/A]"])
    machine = detect({"CUDA_VISIBLE_DEVICES": "0,1"}, root)
    assert machine.devices[0] == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    line, engines = describe(machine)
    assert "2 NUMA nodes" in line
    assert "2 x NVIDIA H100 80GB HBM3 (86 GB each), 1 x NVIDIA GB10" in line
    assert line.endswith("of which CUDA_VISIBLE_DEVICES leaves 2 visible")
    assert engines.startswith("torch ")


def test_gpus_without_the_tool(root, monkeypatch):
    monkeypatch.setenv("PATH", str(root))
    line, _ = describe(detect({"ACCEL_DEVICE_COUNT": "2"}, root))
    assert line.endswith("2 NVIDIA GPUs (names unknown: nvidia-smi is not on the PATH)")


def test_a_machine_without_accelerators(root):
    machine = detect({"ACCEL_DEVICE_COUNT": "0"}, root)
    assert describe(machine)[0].endswith("no accelerator")
    assert machine.host == os.uname().nodename
