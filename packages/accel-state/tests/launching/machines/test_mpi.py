"""The mpirun command."""

import dataclasses

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import Host, plan, plan_world
from accel_state.launching.target import Target

CPU = Host(Accelerators(), physical_cores=8, python="python")


TARGET = Target("train.py", ("--lr", "0.1"))


def configured(*flags, environ=None):
    return resolve(environ=environ or {}, flags=parse_flags(flags), use_default_file=False).local()


def planned(*flags, host=CPU, environ=None, port=1234, target=TARGET):
    config = configured(*flags, environ=environ)
    return plan(config, target, plan_world(config, host.accelerators), environ or {}, host, port=port)


ELASTIC = ("--num_machines", "2", "--num_processes", "4", "--cpu", "--main_process_ip", "10.0.0.1",
           "--main_process_port", "29501", "--machine_rank", "1")  # fmt: skip


@pytest.mark.parametrize(
    ("open_mpi", "head"),
    [
        (True, ["mpirun", "--hostfile", "hosts", "--npernode", "2", "-n", "4", "--bind-to", "socket", "-x"]),
        (False, ["mpirun", "-f", "hosts", "-ppn", "2", "-n", "4", "python", "train.py", "--lr", "0.1"]),
    ],
)
def test_mpi_commands(open_mpi, head):
    host = dataclasses.replace(CPU, open_mpi=open_mpi)
    made = planned(*ELASTIC, "--mpirun_hostfile", "hosts", host=host)
    argv = list(made.processes[0].argv)
    assert argv[: len(head)] == head
    if open_mpi:
        exported = {argv[index + 1] for index, word in enumerate(argv) if word == "-x"}
        assert {"MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"} <= exported
    assert made.processes[0].env["MASTER_ADDR"] == "10.0.0.1"
