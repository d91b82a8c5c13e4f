"""Detection of the process's place in the world, for every kind of cluster."""

from __future__ import annotations

import pytest

from accel_state.clusters import CLUSTERS
from accel_state.clusters.topology import detect
from accel_state.errors import ConfigError

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


def test_clusters_are_asked_in_order_and_the_last_always_answers():
    assert [cluster.name for cluster in CLUSTERS] == [
        "torchrun", "flux", "lsf", "mpi", "slurm", "sagemaker", "single",
    ]  # fmt: skip
    assert CLUSTERS[-1].detect({"SOMETHING": "else"}) is not None
