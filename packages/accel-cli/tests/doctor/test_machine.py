"""Facts about this machine, against what the system's own tools say."""

import contextlib
import importlib.metadata
import os
import shutil
import socket
import subprocess

import pytest

from accel_cli.doctor.machine import GATHERED, Machine, measure_disk


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


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        measure_disk(tmp_path / "gone", 1)
