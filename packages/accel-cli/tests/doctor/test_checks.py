"""The checks of ``accel doctor``, on machines that are made up."""

import dataclasses

import pytest

from accel_cli.doctor.checks import CHECKS
from accel_cli.machine import Machine

GB = 10**9
OURS = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli")
GOOD = Machine(
    versions={**dict.fromkeys(OURS, "0.1.0"), "torch": "2.13.0"}, torch_build="CUDA 12.8", usable=8,
    accelerator_files=8, driver="570.1", shared_memory=64 * GB, shared_free=63 * GB, open_files=65536,
    cpus=64, memory=512 * GB,
    host="node1", addresses=("10.0.0.1",), folder="/data", disk_free=900 * GB, disk_write=2e9, disk_read=3e9,
    temporary_free=90 * GB,
    environ={"ACCELERATE_MIXED_PRECISION": "bf16", "ACCEL_DEVICE_COUNT": "0"},
)  # fmt: skip


def examine(machine):
    return [finding for check, _ in CHECKS for finding in check(machine)]


def bad(**changes):
    return {
        finding.topic: finding
        for finding in examine(dataclasses.replace(GOOD, **changes))
        if finding.status != "ok"
    }


def test_a_good_machine_has_no_findings():
    assert bad() == {}
    assert len({finding.topic for finding in examine(GOOD)}) >= 10


@pytest.mark.parametrize(
    ("topic", "status", "advice", "changes"),
    [
        ("packages", "problem", "series must be the same", {"versions": {**GOOD.versions, "accel-ckpt": "0.2.0"}}),
        ("torch", "problem", "2.9 or newer", {"versions": {**GOOD.versions, "torch": "2.8.0+cu126"}}),
        ("accelerators", "problem", "build of torch for CUDA", {"usable": 0, "torch_build": "the CPU"}),
        ("accelerators", "problem", "nvidia-smi", {"usable": 0}),
        ("CPUs", "warning", "OMP_NUM_THREADS=2", {"cpu_quota": 2.0}),
        ("CPUs", "warning", "more than that", {"environ": {"OMP_NUM_THREADS": "128"}}),
        ("shared memory", "problem", "--shm-size", {"shared_memory": 64 * 2**20, "shared_free": 64 * 2**20}),
        ("shared memory", "problem", "emptyDir with medium: Memory", {"shared_memory": 2**26, "shared_free": 2**26}),
        ("shared memory", "warning", "programs that have ended", {"shared_free": 10**8}),
        ("cluster", "warning", "accel launch stops", {"environ": {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}}),
        ("cluster", "warning", "accel launch stops", {"environ": {"JOB_COMPLETION_INDEX": "1"}}),
        ("open files", "warning", "ulimit -n", {"open_files": 1024}),
        ("host name", "warning", "/etc/hosts", {"addresses": ()}),
        ("host name", "warning", "GLOO_SOCKET_IFNAME", {"addresses": ("127.0.1.1",)}),
        ("port 29500", "warning", "--main_process_port", {"port_free": False}),
        ("disk", "problem", "12 bytes per parameter", {"disk_free": GB}),
        ("disk", "warning", "async_save", {"disk_write": 20e6}),
        ("temporary files", "warning", "TMPDIR", {"temporary_free": 10**8}),
        ("variables", "warning", "did you mean ACCELERATE_DEBUG_MODE", {"environ": {"ACCELERATE_DEBUG_MOD": "1"}}),
    ],
)  # fmt: skip
def test_each_finding_has_a_status_and_a_way_out(topic, status, advice, changes):
    found = bad(**changes)
    assert list(found) == [topic]
    assert found[topic].status == status
    assert advice in found[topic].advice


def test_devices_that_a_variable_hides_are_told():
    hidden = bad(usable=0, environ={"CUDA_VISIBLE_DEVICES": ""})["accelerators"]
    assert "CUDA_VISIBLE_DEVICES='' hides them" in hidden.found
    fewer = dataclasses.replace(GOOD, usable=2, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert any("2 of 8" in finding.found for finding in examine(fewer))


def test_the_machines_of_a_job_are_told():
    def found(**environ):
        findings = examine(dataclasses.replace(GOOD, environ=environ))
        return next((finding.status, finding.found) for finding in findings if finding.topic == "cluster")

    pod = {"JOB_COMPLETION_INDEX": "1", "NNODES": "3", "MASTER_ADDR": "train-0.train"}
    assert found(**pod) == ("ok", "3 machines from the containers' variables, this is machine 2")
    assert found(SLURM_NNODES="2", ACCEL_CLUSTER="none") == found() == ("ok", "none; one machine")


def test_a_clock_that_is_years_behind():
    from accel_cli.machine import Machine

    def status(clock):
        findings = examine(Machine(clock=clock))
        return {found.topic: found.status for found in findings}["clock"]

    assert status(86400.0) == "problem"
    assert status(1.9e9) == "ok"
