"""Options of torchrun that the supervisor of one machine has too, in real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state.launching.numa import cores_of_ranks, read_cpu_topology

LAUNCH = (sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2")
PLACE = """
import os
cpus = sorted(os.sched_getaffinity(0))
print("place", os.environ["RANK"], os.environ["LOCAL_RANK"], cpus, flush=True)
"""
WAIT = """
import os, signal, sys, time
def saved(number, frame):
    print("rank", os.environ["RANK"], "got", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR2, saved)
print("ready", flush=True)
time.sleep(60)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
@pytest.mark.skipif(len(read_cpu_topology().cores) < 2, reason="two ranks need two cores")
def test_ranks_are_bound_to_cores_and_see_themselves_as_first(tmp_path: Path) -> None:
    flags = ("--numa_binding", "exclusive", "--virtual_local_rank")
    done = subprocess.run(
        [*LAUNCH, *flags, script(tmp_path, PLACE)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    cores = [sorted(cpus) for cpus in cores_of_ranks("exclusive", 2, read_cpu_topology())]
    assert not set(cores[0]) & set(cores[1])
    lines = sorted(line.split("] ", 1)[1] for line in done.stdout.splitlines())
    assert lines == [f"place {rank} 0 {cores[rank]}" for rank in range(2)]


def test_a_chosen_signal_reaches_the_ranks(tmp_path: Path) -> None:
    command = [*LAUNCH, "--signals_to_handle", "SIGUSR2", script(tmp_path, WAIT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ready = [launcher.stdout.readline() for _ in range(2)]
        assert all("ready" in line for line in ready)
        launcher.send_signal(signal.SIGUSR2)
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == [f"[rank {rank}] rank {rank} got SIGUSR2" for rank in range(2)]
