"""Processes started by mpirun."""

from __future__ import annotations

import pytest

from accel_state.clusters.topology import Topology, detect

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
    "cray": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}


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


def test_ranks_of_srun_with_variables_of_mpi_know_their_machines():
    """srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, and nothing about machines."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
             "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}  # fmt: skip
    found = detect({**slurm, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (found.launcher, found.local_rank, found.node_rank, found.master_addr) == ("slurm", 1, 1, "n1")
    inside = detect(
        {**slurm, "SLURM_PROCID": "0", "PMI_RANK": "3", "PMI_SIZE": "4"}
    )  # mpirun in a batch script
    assert inside.launcher == "mpi"
