"""A process that would train alone in a job of several."""

from __future__ import annotations

import pytest

from accel_state.clusters.alone import check_script, check_shell
from accel_state.errors import ConfigError

# Whether a process trains alone without a launcher, in a job of: Kubeflow's trainer, an elastic TrainJob, a TrainJob of
# one node with two processes, dstack, SkyPilot, AWS Batch, an Indexed Job, RunPod, Volcano.
JOBS = [
    ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}, "PET_NNODES=2"),
    ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-0:23456", "PET_RDZV_BACKEND": "c10d"}, "PET_NNODES=1:4"),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}, "PET_NPROC_PER_NODE=2"),
    ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2"}, "_NODES_NUM=2"),
    ({"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NUM_NODES=2"),
    ({"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"}, "AWS_BATCH_JOB_NUM_NODES=2"),
    ({"JOB_COMPLETION_INDEX": "0", "NNODES": "2", "MASTER_ADDR": "job-0"}, "NNODES=2"),
    ({"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}, "NUM_NODES=2"),
    ({"VC_WORKER_HOSTS": "a.j,b.j", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "0"}, "VC_WORKER_HOSTS"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "named"), JOBS)
def test_a_script_of_a_job_does_not_start_without_a_launcher(environ, named):
    with pytest.raises(ConfigError) as error:
        check_script(environ)
    for part in (named, "accel launch", "ACCEL_CLUSTER=none"):
        assert part in str(error.value)
    check_script(environ, "none")
    check_script(environ | {"LOCAL_RANK": "0"})


@pytest.fixture
def nodefile(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("n1\nn1\nn2\n")
    return str(file)


def test_the_shell_of_a_batch_job_is_on_one_of_its_machines(nodefile):
    sbatch = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2",
              "ENVIRONMENT": "BATCH"}  # fmt: skip
    shells = {
        "SLURM_JOB_NUM_NODES=2": sbatch,
        "SLURM_NNODES=2": {
            "SLURM_NNODES": "2",
            "SLURM_STEP_ID": "4294967290",
        },  # salloc with an interactive step
        "LSB_MCPU_HOSTS": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 4 hostB 4"},
        f"PBS_NODEFILE={nodefile}": {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": nodefile},
        "NHOSTS=2": {"JOB_ID": "7", "PE_HOSTFILE": "/spool/pe_hostfile", "NHOSTS": "2"},
    }
    for source, environ in shells.items():
        for check in (check_shell, check_script):
            with pytest.raises(ConfigError, match="job has 2 machines") as error:
                check(environ)
            assert source in str(error.value)
            assert "ACCEL_CLUSTER=none" in str(error.value)
            check(environ | {"LOCAL_RANK": "0"})
            check(environ | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})  # mpirun -n 1


def test_jobs_of_one_machine_and_tasks_that_srun_started_are_not_refused(nodefile, tmp_path):
    for environ in (
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 8"},
        {"PBS_NODEFILE": str(tmp_path / "not mounted")},
        {"NHOSTS": "2"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"NNODES": "1", "NODE_RANK": "0"},
        {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "9"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9", "SLURM_NNODES": "1"},
    ):
        check_script(environ)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX is 1", "set NNODES", "ACCEL_CLUSTER=none"]),
        ({"VC_TASK_INDEX": "1"}, ["VC_TASK_INDEX is 1", "set NNODES"]),
        ({"NNODES": "2"}, ["NNODES is 2", "NODE_RANK", "ACCEL_CLUSTER=none"]),
        ({"NODE_RANK": "x"}, ["NODE_RANK", "'x'"]),
    ],
)
def test_variables_that_leave_the_rank_or_the_number_open_are_refused(environ, parts):
    with pytest.raises(ConfigError) as error:
        check_script(environ)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_wanted_scheduler_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"ACCEL_CLUSTER"):
        check_script({}, "slurm")
