"""Worlds that a real `srun` starts, on two nodes that are one machine. Run with `hatch run engines:slurm`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "tools" / "engines" / "slurm.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        subprocess.run(["bash", str(SCRIPT), "start", str(folder)], check=True)
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=True)


def srun(
    environ: dict[str, str], *options: str, script: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = ["srun", *options, sys.executable, str(HERE / "world.py"), *script]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_srun_starts_one_world_on_a_node(cluster: dict[str, str]) -> None:
    done = srun(cluster, "-N", "1", "-n", "2", "-O")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {rank} 2 {rank} 1 [0, 1]" for rank in range(2)]


def test_srun_starts_one_world_on_two_nodes(cluster: dict[str, str]) -> None:
    # The two nodes' names mean nothing to the resolver of this machine, so rank 0's address is given.
    done = srun({**cluster, "MASTER_ADDR": "127.0.0.1"}, "-N", "2", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {rank} 2 0 2 [0, 1]" for rank in range(2)]


def test_a_failing_rank_ends_the_world(cluster: dict[str, str]) -> None:
    done = srun(cluster, "-N", "1", "-n", "2", "-O", script=("1",))
    assert done.returncode != 0
    assert "rank told to fail" in done.stderr
