"""A scheduler's world in the configuration: precedence, contradictions, and what this launcher becomes."""

from __future__ import annotations

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import Origin, resolve
from accel_state.errors import ConfigError
from accel_state.launching.hardware import find_accelerators
from accel_state.launching.plan import plan_world
from accel_state.launching.surroundings import find_surroundings

SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}  # fmt: skip
RANKS = SLURM | {
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}
TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}


def around(environ, *flags, file=None):
    return find_surroundings(
        resolve(file, environ=environ, flags=parse_flags(flags), use_default_file=False), environ
    )


def test_without_a_scheduler_nothing_changes():
    found = around({}, "--num_processes", "2")
    assert (found.allocation, found.joins, found.notes) == (None, False, ())


def test_the_scheduler_gives_what_nothing_else_says():
    found = around(SLURM, "--num_processes", "8")
    config = found.resolved.local()
    assert (config.num_machines, config.machine_rank, config.main_process_ip) == (2, 1, "n1")
    assert (config.num_processes, found.joins) == (8, False)
    assert found.resolved.origin("num_machines") == Origin.SCHEDULER
    assert found.notes == ("2 machines from Slurm, this is machine 2",)


def test_processes_per_machine_are_multiplied():
    assert around(TRAINER).resolved.local().num_processes == 8


def test_processes_of_one_machine_that_a_flag_of_torchrun_gives_are_multiplied():
    assert around(SLURM, "--nproc_per_node", "3").resolved.local().num_processes == 6
    assert around(TRAINER, "--nproc_per_node", "4").resolved.local().num_processes == 8
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE=4"):
        around(TRAINER, "--nproc_per_node", "3")
    with pytest.raises(ConfigError, match="SLURM_NNODES=2"):
        around(SLURM, "--nproc_per_node", "3", "--nnodes", "3")


def test_a_process_alone_on_its_machine_becomes_the_script():
    assert around(SLURM, "--cpu").joins
    assert not around(SLURM, "--cpu", "--max_restarts", "1").joins
    assert not around(SLURM, "--cpu", "--main_process_ip", "other").joins
    assert not around(TRAINER | {"PET_NPROC_PER_NODE": "1"}).joins  # a script alone does not read PET_*


def test_a_task_for_each_rank_becomes_the_script():
    found = around(RANKS)
    assert found.joins
    assert found.notes == ("4 ranks from Slurm, this is rank 0",)
    assert around(RANKS | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).notes == ()  # told once


@pytest.mark.parametrize(
    ("environ", "flags", "parts"),
    [
        (SLURM, ("--num_machines", "3"), ["--num_machines 3", "SLURM_NNODES=2", "--cluster none"]),
        (SLURM, ("--machine_rank", "0"), ["--machine_rank 0", "SLURM_NODEID=1"]),
        (TRAINER, ("--num_processes", "4"), ["--num_processes 4", "PET_NPROC_PER_NODE=4", "says 8"]),
        (RANKS, ("--num_processes", "2"), ["--num_processes 2", "SLURM_NTASKS=4"]),
        (RANKS, ("--num_machines", "2"), ["--num_machines 2", "--ntasks-per-node=1"]),
        (RANKS, ("--max_restarts", "2"), ["--max_restarts", "one by one"]),
    ],
)
def test_a_flag_that_contradicts_the_scheduler_is_an_error(environ, flags, parts):
    with pytest.raises(ConfigError) as error:
        around(environ, *flags)
    assert all(part in str(error.value) for part in parts), error.value
    if "--max_restarts" not in flags:
        assert around(environ, *flags, "--cluster", "none").allocation is None


def test_flags_that_agree_and_addresses_are_kept():
    flags = (
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.1",
        "--main_process_port",
        "7",
    )
    config = around(SLURM, *flags).resolved.local()
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 7)


def test_a_file_for_one_machine_is_used_on_each(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 4\nmachine_rank: 0\n"
    )
    found = around(SLURM, file=str(file))
    assert (found.resolved.local().num_machines, found.resolved.local().num_processes) == (2, 8)
    assert any("num_machines: 1" in note and "SLURM_NNODES=2" in note for note in found.notes)


def test_spare_machines_are_in_the_job_too():
    config = around(SLURM, "--num_machines", "1", "--spares", "1").resolved.local()
    assert (config.num_machines, config.spares, config.machine_rank) == (1, 1, 0)


@pytest.mark.parametrize("flags", [("--mpirun_hostfile", "h"), ("--submit", "slurm")])
def test_what_others_place_is_left_alone(flags):
    assert around(SLURM, *flags).allocation is None


def test_a_job_is_not_submitted_whose_launchers_would_ignore_its_machines():
    with pytest.raises(ConfigError, match=r"^--cluster none, so .*--submit slurm gets; remove it"):
        around({}, "--submit", "slurm", "--cluster", "none")
    with pytest.raises(
        ConfigError, match=r"^ACCEL_CLUSTER=none in the environment, so "
    ):  # sbatch hands it on
        around({"ACCEL_CLUSTER": "none"}, "--submit", "slurm")


def test_a_machine_rank_without_a_number_of_machines_is_an_error():
    for name in ("NODE_RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX"):
        with pytest.raises(ConfigError, match=rf"{name} is 1.*NNODES.*--num_machines"):
            around({name: "1"})
        place = ("--num_machines", "2", "--machine_rank", "1")
        assert around({name: "1"}, *place).resolved.local().machine_rank == 1
        assert around({name: "1"}, "--cluster", "none").allocation is None
    assert around({"NODE_RANK": "0"}).notes == ()


def test_the_first_pod_of_an_indexed_job_is_told_that_it_trains_alone():
    pod = {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    (note,) = around(pod).notes
    assert "JOB_COMPLETION_INDEX is 0" in note
    assert "NNODES" in note
    for single in (pod | {"NNODES": "1"}, pod | {"LOCAL_RANK": "0"}, pod | {"ACCEL_CLUSTER": "none"}):
        assert around(single).notes == ()


def test_the_shell_of_a_job_with_several_machines_does_not_start_on_one():
    shell = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    with pytest.raises(
        ConfigError, match=r"Slurm job has 3 machines \(SLURM_NNODES=3\).*srun.*--cluster none"
    ):
        around(shell)
    assert around(shell, "--cluster", "none").notes == ()
    assert around(shell | {"ACCEL_CLUSTER": "none"}).allocation is None
    place = ("--num_machines", "3", "--machine_rank", "0", "--main_process_ip", "n1")
    assert around(shell, *place).resolved.local().num_machines == 3
    config = resolve(None, environ=shell, use_default_file=False)
    assert find_surroundings(config, shell, trains=False).notes == ()


def test_a_launcher_in_a_rank_does_not_inherit_the_scheduler_of_its_launcher():
    inherited = SLURM | {"ACCEL_CLUSTER": "slurm"}
    assert around(inherited).allocation.total == 2
    assert around(inherited | {"LOCAL_RANK": "0"}).allocation is None
    assert around(SLURM | {"LOCAL_RANK": "0"}, "--cluster", "slurm").allocation.total == 2


ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}


def _mpi(rank, size, local_rank, local_size, *names):
    return ADDRESS | dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def _open_mpi(*numbers):
    prefix = "OMPI_COMM_WORLD_"
    return _mpi(*numbers, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _hydra(*numbers):
    return _mpi(*numbers, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _cray(*numbers):
    return {
        "PBS_JOBID": "7.pbs",
        **_mpi(*numbers, "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    }


def _mvapich(*numbers):
    prefix = "MV2_COMM_WORLD_"
    return _mpi(*numbers, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _flux(rank, size, local_rank, local_size):
    return ADDRESS | {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": str(size), "FLUX_JOB_NNODES": str(size // local_size),
                      "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(local_rank), "PMI_RANK": str(rank),
                      "PMI_SIZE": str(size)}  # fmt: skip


def _jsrun(rank, size, local_rank, local_size):
    return ADDRESS | {"LSB_JOBID": "7", "LSB_HOSTS": "batch n1 n2", "JSM_NAMESPACE_SIZE": str(size),
                      "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(local_rank),
                      "JSM_NAMESPACE_LOCAL_SIZE": str(local_size)}  # fmt: skip


def _slurm(rank, size, local_rank, local_size):
    machines = size // local_size
    return {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size),
            "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(rank // local_size), "SLURM_NNODES": str(machines),
            "SLURM_STEP_NODELIST": f"n[1-{machines}]", "SLURM_NTASKS_PER_NODE": str(local_size),
            "SLURM_TASKS_PER_NODE": f"{local_size}(x{machines})"}  # fmt: skip


def _slurm_pmi2(rank, size, *local):
    return _slurm(rank, size, *local) | {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}


TASKS = [_slurm, _slurm_pmi2, _flux, _jsrun, _open_mpi, _hydra, _cray, _mvapich]
MACHINES = [
    ADDRESS | {"WORLD_SIZE": "2", "RANK": "1"},
    ADDRESS | {"NNODES": "2", "NODE_RANK": "1"},
    ADDRESS | {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
    ADDRESS
    | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "2", "RANK": "1"},
    {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"},
    {"DSTACK_NODES_NUM": "2", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2", "DSTACK_NODE_RANK": "1"},
    {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"},
    {
        "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}, '
        '"task": {"type": "workerpool1", "index": 0}}'
    },
    {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    {"VC_WORKER_HOSTS": "w-0.job,w-1.job", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1"},
    ADDRESS | {"NNODES": "2", "JOB_COMPLETION_INDEX": "1"},
    *(tasks(1, 2, 0, 1) for tasks in TASKS),
]


def started(environ, *flags, file=None):
    """Machines, and ranks that this launcher starts; it is itself a rank if it becomes the script."""
    found = around(environ, *flags, file=file)
    config = found.resolved.local()
    if found.joins:
        return config.num_machines, 1
    return config.num_machines, plan_world(config, find_accelerators(environ)).local_size


@pytest.mark.parametrize("environ", MACHINES)
def test_one_launcher_on_each_machine_starts_a_rank_for_each_accelerator(environ, tmp_path):
    four = environ | {"ACCEL_DEVICE_COUNT": "4"}
    assert started(four) == (2, 4)
    assert started(four | {"CUDA_VISIBLE_DEVICES": "1,3"}) == (2, 2)
    assert started(four | {"CUDA_VISIBLE_DEVICES": "2"}) == (2, 1)
    assert started(four, "--gpu_ids", "0,1") == (2, 2)
    assert started(four, "--nproc_per_node", "gpu") == (2, 4)
    assert started(four, "--nproc_per_node", "3") == (2, 3)
    assert started(four, "--num_processes", "4") == (2, 2)
    assert started(four, "--cpu") == (2, 1)
    assert started(environ | {"ACCEL_DEVICE_COUNT": "0"}) == (2, 1)
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: bf16\n")
    assert started(four, file=str(file)) == (2, 4)
    assert started(four | {"LOCAL_RANK": "0"}) == (1, 4)  # a launcher in a rank of another launcher
    assert started(four, "--cluster", "none") == (1, 4)


@pytest.mark.parametrize("tasks", TASKS)
def test_several_tasks_on_a_machine_are_ranks(tasks):
    for place in ((5, 8, 1, 4), (3, 4, 3, 4)):
        found = around(tasks(*place) | {"ACCEL_DEVICE_COUNT": "4"})
        assert (found.joins, found.allocation.role, found.allocation.total) == (True, "rank", place[1])
    alone = tasks(0, 1, 0, 1) | {"ACCEL_DEVICE_COUNT": "4"}
    assert started(alone) == (1, 4)


@pytest.mark.parametrize("tasks", [_open_mpi, _hydra, _cray, _mvapich])
def test_launchers_of_mpi_on_several_machines_need_an_address(tasks):
    environ = {name: value for name, value in tasks(1, 2, 0, 1).items() if name not in ADDRESS}
    found = around(environ | {"ACCEL_DEVICE_COUNT": "4"})
    assert (found.joins, found.resolved.local().main_process_ip) == (False, None)  # the agent asks for it
