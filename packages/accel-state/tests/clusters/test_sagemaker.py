"""Processes of a SageMaker job."""

import pytest

from accel_state.clusters.topology import detect
from accel_state.errors import ConfigError

JOB = {"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-10"}


def test_each_machine_is_a_rank():
    place = detect(JOB)
    assert (place.rank, place.world_size, place.launcher) == (2, 3, "sagemaker")
    assert (place.local_rank, place.local_world_size, place.node_rank, place.num_nodes) == (0, 1, 2, 3)
    assert (place.master_addr, place.master_port) == ("algo-1", 7777)
    assert detect(JOB | {"SM_CURRENT_HOST": "algo-1"}).rank == 0


def test_torchrun_inside_a_job_takes_precedence():
    place = detect(JOB | {"RANK": "1", "WORLD_SIZE": "24", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"})
    assert (place.rank, place.world_size, place.launcher) == (1, 24, "torchrun")


def test_ranks_that_mpirun_starts_find_rank_0():
    ranks = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "24"}
    place = detect(JOB | ranks | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert (place.rank, place.master_addr, place.launcher) == (9, "algo-1", "mpi")


@pytest.mark.parametrize("hosts", ["", '["algo-1"]', "[]"])
def test_one_machine_runs_alone(hosts):
    assert detect({"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-1"}).world_size == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS is 'algo-1,algo-2'; expected a JSON list"),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "SM_CURRENT_HOST is 'c', which SM_HOSTS"),
        ({"SM_HOSTS": '["a", "b"]'}, "SM_CURRENT_HOST is ''"),
    ],
)
def test_wrong_variables_are_named(variables, said):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        detect(variables)
