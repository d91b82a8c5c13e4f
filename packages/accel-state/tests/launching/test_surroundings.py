"""A scheduler's world in the configuration: precedence, contradictions, and what this launcher becomes."""

from __future__ import annotations

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import Origin, resolve
from accel_state.errors import ConfigError
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


def test_a_machine_rank_without_a_number_of_machines_is_an_error():
    with pytest.raises(ConfigError, match=r"NODE_RANK is 1.*NNODES.*--num_machines"):
        around({"NODE_RANK": "1"})
    place = ("--num_machines", "2", "--machine_rank", "1")
    assert around({"NODE_RANK": "1"}, *place).resolved.local().machine_rank == 1
    assert around({"NODE_RANK": "0"}).notes == ()


def test_the_shell_of_a_job_with_several_machines_is_told_about_srun():
    shell = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    assert around(shell).notes == (
        "this Slurm job has 3 machines, but only this one is used: start the launcher with srun to use all",
    )
    assert around(shell, "--cluster", "none").notes == ()
