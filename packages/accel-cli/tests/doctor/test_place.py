"""Which ranks a doctor starts, from flags and from a scheduler's variables."""

import pytest

from accel_cli.doctor.place import find_place
from accel_cli.doctor.world import RankPlace
from accel_state.config.flags import parse_flags
from accel_state.errors import ConfigError
from accel_state.launching.plan import World

# Rank 1 of two on each of two machines, as srun starts them.
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
         "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
         "SLURM_TASKS_PER_NODE": "2(x2)"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_default_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def place(*flags, environ=None):
    return find_place(parse_flags(["--cpu", *flags], {"config_file": True}), environ or {})


@pytest.mark.parametrize("flags", [(), ("--num_processes", "1")])
def test_one_process_is_no_world(flags):
    assert place(*flags) is None


def test_the_shell_of_a_job_with_several_machines_can_be_checked():
    assert place(environ={"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}) is None


def test_ranks_of_one_machine_meet_at_any_port_of_it():
    found = place("--num_processes", "3")
    assert found.place == RankPlace(World(3, 3, 1, 0, True), 0, 3, "127.0.0.1", 0)
    assert (found.tells, found.names) == (True, [])
    assert place("--num_processes", "2", "--main_process_port", "1234").place.port == 1234


@pytest.mark.parametrize(("machine", "first"), [(0, 0), (1, 4)])
def test_each_machine_starts_its_own_ranks(machine, first):
    several = ("--num_machines", "2", "--num_processes", "8", "--main_process_ip", "127.0.0.1")
    found = place(*several, "--machine_rank", str(machine))
    assert found.place == RankPlace(World(8, 4, 2, machine, True), first, 4, "127.0.0.1", 29500)
    assert found.tells


def test_machines_without_an_address():
    with pytest.raises(ConfigError, match="--main_process_ip"):
        place("--num_machines", "2", "--num_processes", "4", "--machine_rank", "0")


def test_a_name_that_does_not_resolve_is_a_finding():
    several = ("--num_machines", "2", "--num_processes", "2", "--machine_rank", "0")
    (finding,) = place(*several, "--main_process_ip", "nowhere.invalid").names
    assert (finding.topic, finding.status) == ("host names", "problem")
    assert finding.found.startswith("nowhere.invalid does not resolve (")


def test_a_rank_of_a_scheduler_is_its_own_place_alone():
    found = place(environ=SLURM | {"MASTER_PORT": "2345"})
    assert found.place == RankPlace(World(4, 2, 2, 0, True), 1, 1, "127.0.0.1", 2345)
    assert not found.tells  # the first rank of the machine does
    first = place(environ=SLURM | {"MASTER_PORT": "2345", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert (first.place.first, first.place.count, first.tells) == (0, 1, True)
