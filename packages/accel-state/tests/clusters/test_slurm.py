"""Processes started by srun."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.clusters.base import stable_port
from accel_state.clusters.slurm import first_host, tasks_per_node
from accel_state.clusters.topology import Topology, detect

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008],login1",
}


def test_slurm_on_several_nodes():
    port = stable_port("4711.0")
    assert detect(SLURM) == Topology(4, 7, 1, 3, 1, 3, "gpu007", port, "slurm")
    assert 15000 <= port < 32768  # below the ephemeral ports of Linux


def test_slurm_on_one_node_meets_on_the_loopback():
    environ = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    topology = detect(environ)
    assert (topology.rank, topology.local_world_size, topology.num_nodes) == (1, 2, 1)
    assert topology.master_addr == "127.0.0.1"


def test_slurm_takes_the_address_that_it_is_told():
    topology = detect({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (topology.master_addr, topology.master_port) == ("10.0.0.1", 4000)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None, "ENVIRONMENT": "BATCH"},  # the script of sbatch, before any srun
        {"SLURM_PROCID": None},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_that_srun_did_not_start_is_alone(changes):
    environ = {**SLURM, **changes}
    assert detect({name: value for name, value in environ.items() if value is not None}) == Topology()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[003-005,7]", "n003"),
        ("rack[1-2]n[003-005,7],login1", "rack1n003"),
        ("gpu[9,11-12]-ib", "gpu9-ib"),
        ("", ""),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_tasks_per_node_reads_slurms_short_form(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]
