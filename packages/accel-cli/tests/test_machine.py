"""Facts about this machine, against what the system's own tools say, and with a simulated nvidia-smi and /sys."""

import contextlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys

import pytest

from accel_cli.machine import GATHERED, Machine, describe, detect, measure_disk


def gather_machine(folder, environ):
    facts = {"environ": environ}
    for gather in GATHERED.values():
        facts |= gather(folder)
    return Machine(**facts)


def test_facts_are_those_of_the_system(tmp_path):
    machine = gather_machine(tmp_path, {"A": "1"})
    assert machine.versions["torch"] == importlib.metadata.version("torch")
    assert machine.host == socket.gethostname()
    assert machine.environ == {"A": "1"}
    assert abs(machine.disk_free - shutil.disk_usage(tmp_path).free) < 2**30
    assert os.listdir(tmp_path) == [], "the probe is removed"
    limit = subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True).stdout.strip()
    assert limit in ("unlimited", str(machine.open_files))
    if shutil.which("nproc"):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        count = subprocess.run(["nproc"], capture_output=True, text=True, env=environ).stdout
        assert machine.cpus == int(count)


def test_a_port_that_is_in_use_is_seen(tmp_path):
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it: that is as good
            taken.bind(("", 29500))
            taken.listen()
        assert not gather_machine(tmp_path, {}).port_free


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a folder")
def test_the_shared_memory_of_a_container_is_read(tmp_path):
    """On a mount as Docker makes it: 64 MB, of which another program has filled the half."""
    script = (
        "from pathlib import Path\n"
        "from accel_cli.machine import GATHERED, Machine\n"
        "from accel_cli.doctor.checks import CHECKS\n"
        "facts = GATHERED['reading the limits of this machine'](Path('.'))\n"
        "print(facts['shared_memory'], facts['shared_free'])\n"
        "findings = [finding for check, _ in CHECKS for finding in check(Machine(**facts))]\n"
        "print(next(finding for finding in findings if finding.topic == 'shared memory'))\n"
    )
    mounted = "mount -t tmpfs -o size=64m none /dev/shm && head -c 32M /dev/zero > /dev/shm/other && exec "
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mounted} "$0" -c "$1"', sys.executable, script],
        capture_output=True, text=True,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"this system does not let root mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    sizes, finding = done.stdout.splitlines()
    assert sizes == f"{64 * 2**20} {32 * 2**20}"
    assert "status='problem'" in finding
    assert "/dev/shm has 67 MB, 34 MB free" in finding


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        measure_disk(tmp_path / "gone", 1)


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
