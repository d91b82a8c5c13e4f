"""Detection of the process's place in the world, for every kind of cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.errors import ConfigError
from accel_state.world.clusters import CLUSTERS
from accel_state.world.clusters.base import stable_port
from accel_state.world.clusters.slurm import first_host, tasks_per_node
from accel_state.world.topology import Topology, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "1234",
}
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
MPI_NAMES = {
    "open mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich and intel mpi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def test_no_launcher_is_a_world_of_one():
    assert detect({}) == Topology() == Topology(0, 1, 0, 1, 0, 1, None, None, "single")


def test_torchrun():
    assert detect(TORCHRUN) == Topology(3, 4, 1, 2, 1, 2, "host-a", 1234, "torchrun")


def test_torchrun_comes_before_the_job_that_it_runs_in():
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"
    assert (
        detect({**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}).launcher == "torchrun"
    )


def test_mpirun_comes_before_the_allocation_that_it_runs_in():
    environ = {
        **SLURM,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    assert detect(environ).launcher == "mpi"


@pytest.mark.parametrize(
    ("environ", "local_rank", "local_world_size"),
    [
        (
            {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1"},
            1,
            4,
        ),  # all ranks meet on this machine: all are here
        ({"MASTER_ADDR": "host-a"}, 0, 1),  # one process per container
        ({"MASTER_ADDR": "host-a", "LOCAL_RANK": "1", "NNODES": "2"}, 1, 2),
        ({"MASTER_ADDR": "host-a", "LOCAL_RANK": "1"}, 1, 2),
    ],
)
def test_local_size_is_worked_out_where_it_is_missing(environ, local_rank, local_world_size):
    topology = detect({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1", **environ})
    assert (topology.local_rank, topology.local_world_size) == (local_rank, local_world_size)


@pytest.mark.parametrize("names", MPI_NAMES.values(), ids=MPI_NAMES)
def test_mpi_on_one_node(names):
    topology = detect(dict(zip(names, ("1", "3", "1", "3"), strict=True)))
    assert topology == Topology(1, 3, 1, 3, 0, 1, "127.0.0.1", 29500, "mpi")


@pytest.mark.parametrize("names", MPI_NAMES.values(), ids=MPI_NAMES)
def test_mpi_on_several_nodes_does_not_guess_the_address(names):
    environ = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    assert detect(environ) == Topology(3, 4, 1, 2, 1, 2, None, 29500, "mpi")
    told = detect({**environ, "MASTER_ADDR": "host-a", "MASTER_PORT": "77"})
    assert (told.master_addr, told.master_port) == ("host-a", 77)


def test_mpi_port_follows_the_job():
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    one, other = (detect({**environ, "PMI_JOBID": job}).master_port for job in ("kvs_1", "kvs_2"))
    assert one != other
    assert one == detect({**environ, "PMI_RANK": "1", "PMI_JOBID": "kvs_1"}).master_port


def test_mpi_of_one_process_is_no_world():
    assert detect({"PMI_RANK": "0", "PMI_SIZE": "1"}) == Topology()


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
    ("environ", "parts"),
    [
        ({**TORCHRUN, "RANK": "two"}, ["RANK", "'two'"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK is 4", "WORLD_SIZE is 4", "between 0 and 3"]),
        ({**TORCHRUN, "RANK": "-2"}, ["RANK is -2"]),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, ["WORLD_SIZE", "'4.0'"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE is 5", "WORLD_SIZE, 4"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT is 70000", "65535"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is 2", "RANK is not set", "launcher"]),
        ({"RANK": "1"}, ["RANK is 1", "WORLD_SIZE is not set"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK is 1", "WORLD_SIZE is not set"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE is 2", "PMI_RANK is not set"]),
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, ["PMI_RANK is 2", "PMI_SIZE is 2"]),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "1"},
            ["MPI_LOCALRANKID is 1", "MPI_LOCALNRANKS is 1"],
        ),
        ({**SLURM, "SLURM_PROCID": "x"}, ["SLURM_PROCID", "'x'"]),
        ({**SLURM, "SLURM_PROCID": "9"}, ["SLURM_PROCID is 9", "SLURM_STEP_NUM_TASKS is 7"]),
        ({**SLURM, "SLURM_LOCALID": ""}, ["SLURM_LOCALID is not set", "srun"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3x2"}, ["'3x2'"]),
    ],
)
def test_wrong_variables_are_named_with_their_value(environ, parts):
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_minus_one_means_unset(name):
    assert detect({name: "-1"}) == Topology()


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


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_every_rank_of_a_torchrun_world_finds_its_place(nodes, per_node, data):
    world_size = nodes * per_node
    rank = data.draw(st.integers(0, world_size - 1))
    topology = detect(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }
    )
    assert topology.node_rank * per_node + topology.local_rank == topology.rank == rank
    assert topology.num_nodes == nodes


def test_clusters_are_asked_in_order_and_the_last_always_answers():
    assert [cluster.name for cluster in CLUSTERS] == ["torchrun", "mpi", "slurm", "single"]
    assert CLUSTERS[-1].detect({"SOMETHING": "else"}) is not None
