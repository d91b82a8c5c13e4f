"""Worlds that a real `mpirun` starts. Run with `hatch run engines:mpi`, which installs Open MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WORLD = HERE / "world.py"


@pytest.fixture(scope="module", autouse=True)
def open_mpi() -> None:
    subprocess.run(["bash", str(HERE.parents[1] / "tools" / "engines" / "mpi.sh")], check=True)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def mpirun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, str(WORLD), *arguments
    )


def test_mpirun_starts_one_world() -> None:
    done = mpirun()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"mpi {rank} 3 {rank} 1 [0, 1, 2]" for rank in range(3)]


def test_a_failing_rank_ends_the_world() -> None:
    done = mpirun("1")
    assert done.returncode != 0
    assert "rank told to fail" in done.stderr


def test_accel_launch_goes_through_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    launch = (sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2")
    done = run(*launch, "--mpirun_hostfile", str(hosts), str(WORLD))
    assert done.returncode == 0, done.stderr
    assert "[0, 1]" in done.stdout


def test_a_launcher_that_mpirun_starts_is_a_rank() -> None:
    start = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    done = run(*start, sys.executable, "-m", "accel_cli", "launch", "--cpu", str(WORLD))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"mpi {rank} 2 {rank} 1 [0, 1]" for rank in range(2)]
    assert "accel: 2 ranks from MPI, this is rank 0" in done.stderr
