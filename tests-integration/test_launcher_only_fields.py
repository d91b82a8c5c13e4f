"""Options that no variable carries reach the commands and the supervisor, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.commands import launch as launch_command
from accel_state.config import launcher_only_fields, parse_flags, resolve
from accel_state.launching.engines import check_available
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import Host, plan, plan_world
from accel_state.launching.run import policy_of
from accel_state.launching.target import Target

TWO_GPUS = Host(Accelerators("cuda", 2, 2, "CUDA_VISIBLE_DEVICES"), physical_cores=4, python="python")
TWO_MACHINES = "--cpu --num_machines 2 --num_processes 4 --main_process_ip 10.0.0.1 --main_process_port 1234"
HOSTS = Path(__file__).parents[1] / "packages" / "accel-state" / "tests" / "data" / "deepspeed_hosts"
DEEPSPEED = "--cpu --use_deepspeed --deepspeed_multinode_launcher pdsh"
ELASTIC = f"{TWO_MACHINES} --rdzv_backend c10d"
# Option to flags around it, and the flag that must make a difference.
EFFECTS = {
    "num_processes": ("--cpu", "--num_processes 3"),
    "num_machines": (TWO_MACHINES, "--num_machines 4"),
    "machine_rank": (TWO_MACHINES, "--machine_rank 1"),
    "main_process_ip": (TWO_MACHINES, "--main_process_ip 10.0.0.2"),
    "main_process_port": (TWO_MACHINES, "--main_process_port 1235"),
    "same_network": (ELASTIC, "--same_network"),
    "rdzv_backend": (TWO_MACHINES, "--rdzv_backend c10d"),
    "rdzv_conf": (ELASTIC, "--rdzv_conf timeout=3"),
    "gpu_ids": ("--num_processes 2 --multi_gpu", "--gpu_ids 1,0"),
    "processes_per": ("--cpu", "--processes_per cpu"),
    "tee": (TWO_MACHINES, "--tee 3"),
    "log_dir": ("--cpu --num_processes 2", "--log_dir logs"),
    "role": (TWO_MACHINES, "--role trainer"),
    "max_restarts": ("--cpu --num_processes 2", "--max_restarts 2"),
    "monitor_interval": ("--cpu --num_processes 2", "--monitor_interval 3"),
    "grace_period": ("--cpu --num_processes 2", "--grace_period 3"),
    "quiet": ("--cpu --num_processes 2", "--quiet"),
    "mpirun.hostfile": (TWO_MACHINES, "--mpirun_hostfile hosts"),
    "min_machines": (TWO_MACHINES, "--min_machines 1"),
    "spares": (TWO_MACHINES, "--spares 1"),
    "connect_timeout": (TWO_MACHINES, "--connect_timeout 3"),
    "rdzv_id": (ELASTIC, "--rdzv_id run7"),
    "start_timeout": ("--cpu --num_processes 2", "--start_timeout 3"),
    "step_timeout": ("--cpu --num_processes 2", "--step_timeout 3"),
    "checkpoint_timeout": ("--cpu --num_processes 2", "--checkpoint_timeout 3"),
    "straggler_report": ("--cpu --num_processes 2", "--straggler_report"),
    "signals_to_handle": ("--cpu --num_processes 2", "--signals_to_handle SIGUSR2"),
    "virtual_local_rank": ("--cpu --num_processes 2", "--virtual_local_rank"),
    "deepspeed.deepspeed_hostfile": (DEEPSPEED, f"--deepspeed_hostfile {HOSTS}"),
    "deepspeed.deepspeed_exclusion_filter": (DEEPSPEED, "--deepspeed_exclusion_filter worker-1"),
    "deepspeed.deepspeed_inclusion_filter": (DEEPSPEED, "--deepspeed_inclusion_filter worker-1"),
    "deepspeed.deepspeed_multinode_launcher": (DEEPSPEED, "--deepspeed_multinode_launcher nossh"),
}
POD = {
    "tpu.tpu_name": "--tpu_name two",
    "tpu.tpu_zone": "--tpu_zone here",
    "tpu.tpu_use_cluster": "--no-tpu_cluster",
    "tpu.tpu_use_sudo": "--tpu_use_sudo",
    "tpu.tpu_vm": "--vm one",
    "tpu.tpu_env": "--env A=1",
    "tpu.main_training_function": "--main_training_function train",
}
SET_UP = {"tpu.command_file", "tpu.commands"}  # accel tpu-config, whose tests have them
COMMAND = {"module", "no_python", "dry_run"}
# These reach the plan through the host, the scheduler or a batch script, whose own tests show their effects.
ELSEWHERE = {"numa_binding", "submit"} | {
    path for path in launcher_only_fields() if path.startswith("submission.")
}


def started(flags):
    """What would be started, and how it would be watched."""
    resolved = resolve(environ={}, flags=parse_flags(flags.split()), use_default_file=False)
    config = check_available(resolved)
    target = Target("train.py")
    return plan(config, target, plan_world(config, TWO_GPUS.accelerators), {}, TWO_GPUS, port=5), policy_of(
        config
    )


def test_no_option_is_forgotten():
    assert {*EFFECTS, *COMMAND, *ELSEWHERE, *POD, *SET_UP} == set(launcher_only_fields())


@pytest.mark.parametrize("path", EFFECTS)
def test_the_option_makes_a_difference(path):
    around, flag = EFFECTS[path]
    assert started(f"{around} {flag}") != started(around)


@pytest.mark.parametrize("path", POD)
def test_the_option_makes_a_difference_on_a_pod(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    shown = []
    for flags in ([], POD[path].split()):
        around = ["--tpu", "--tpu_cluster", "--tpu_name", "one", "--num_processes", "1", "--dry_run"]
        assert launch_command.main([*around, *flags, str(tmp_path / "train.py")]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


def test_module_program_and_dry_run_reach_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    commands = {}
    for flag, target in (("", "train.py"), ("--module", "train"), ("--no_python", "true")):
        assert launch_command.main(["--cpu", "--num_processes", "2", "--dry_run", *flag.split(), target]) == 0
        commands[flag] = capsys.readouterr().out.splitlines()[-1]
    assert commands[""].endswith(" train.py")
    assert commands["--module"].endswith("-m train")
    assert commands["--no_python"].split() == ["true"]
