"""DeepSpeed's launchers: real runs where they can run, else our commands read by DeepSpeed's own parser and runners.

Run with `hatch run engines:deepspeed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state.config import parse_flags, resolve
from accel_state.launching.machines.deepspeed import deepspeed_argv
from accel_state.launching.target import Target

runner = pytest.importorskip("deepspeed.launcher.runner")

HERE = Path(__file__).parent
RANKS = {"[0, 1]"}


def launch(tmp_path: Path, launcher: str, *flags: str) -> subprocess.CompletedProcess[str]:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--use_deepspeed", "--zero_stage", "1"]
    command += ["--deepspeed_multinode_launcher", launcher, "--deepspeed_hostfile", str(hosts), *flags]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        [*command, str(HERE / "world.py")], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "flags", [(), ("--num_processes", "2"), ("--deepspeed_inclusion_filter", "localhost:0,1")]
)
def test_nossh_starts_the_ranks_of_this_machine(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = launch(tmp_path, "nossh", *flags)
    assert done.returncode == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.endswith("[0, 1]"))
    assert [line.split()[:3] for line in ranks] == [["torchrun", "0", "2"], ["torchrun", "1", "2"]]


def test_a_filter_leaves_slots_out(tmp_path: Path) -> None:
    done = launch(tmp_path, "nossh", "--deepspeed_exclusion_filter", "localhost:1")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(" [0]")], done.stdout


def test_openmpi_starts_the_ranks(tmp_path: Path) -> None:
    subprocess.run(["bash", str(HERE.parents[1] / "tools" / "engines" / "mpi.sh")], check=True)
    done = launch(tmp_path, "openmpi")
    assert done.returncode == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.endswith("[0, 1]"))
    assert [line.split()[:3] for line in ranks] == [["mpi", "0", "2"], ["mpi", "1", "2"]]


def test_the_exit_code_of_a_rank_comes_back(tmp_path: Path) -> None:
    done = launch(tmp_path, "nossh", "--no_python")  # the script has no run bit, so no rank can start
    assert done.returncode != 0


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_deepspeeds_parser_and_runner_understand_the_command(
    tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=2\nworker-2 slots=2\n")
    flags = [
        "--use_deepspeed",
        "--deepspeed_multinode_launcher",
        launcher,
        "--deepspeed_hostfile",
        str(hosts),
    ]
    config = resolve(environ={}, flags=parse_flags(flags), use_default_file=False).local()
    words = deepspeed_argv(config, Target("train.py", ("--lr", "0.1")), sys.executable, {"ACCELERATE_X": "1"})
    args = runner.parse_args(list(words[3:]))
    assert (args.hostfile, args.launcher, args.no_local_rank) == (str(hosts), launcher, True)
    assert args.master_addr == "worker-1"
    pool = runner.fetch_hostfile(args.hostfile)
    active = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    kind = runner.LAUNCHER_CLASSES[launcher]
    info = runner.encode_world_info(active)
    made = kind(args, info) if launcher == "pdsh" else kind(args, info, pool)
    command = made.get_cmd(dict(os.environ), active)
    command = command[0] if launcher == "pdsh" else command
    text = " ".join(command)
    assert text.count("train.py --lr 0.1") == (4 if launcher == "impi" else 1)  # it names every rank
    if launcher != "slurm":  # srun passes on all variables
        assert "env ACCELERATE_X=1 MASTER_ADDR=worker-1" in text
    if launcher in ("openmpi", "mpich", "mvapich", "slurm"):
        assert "4" in command
