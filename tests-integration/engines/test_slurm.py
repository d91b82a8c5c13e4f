"""Worlds that a real `srun` starts, on two nodes that are one machine. Run with `hatch run engines:slurm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "tools" / "engines" / "slurm.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        subprocess.run(["bash", str(SCRIPT), "start", str(folder)], check=True)
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        # Jobs outlive the daemons, and the next cluster gives the same numbers, and so the same ports, again.
        environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        subprocess.run(["scancel", "--me"], env=environ, check=False)
        subprocess.run(["scancel", "--me", "--signal=KILL"], env=environ, check=False)
        time.sleep(1)
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


LAUNCH = (sys.executable, "-m", "accel_cli", "launch", "--cpu")


def launched(
    environ: dict[str, str], *options: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = ["srun", *options, *LAUNCH, *flags, str(HERE / "world.py")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)


def test_a_launcher_for_each_rank_becomes_the_rank(cluster: dict[str, str]) -> None:
    done = launched(cluster, "-N", "1", "-n", "2", "-O")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {rank} 2 {rank} 1 [0, 1]" for rank in range(2)]
    assert done.stderr.count("accel: 2 ranks from Slurm, this is rank 0") == 1


def test_a_launcher_for_each_machine_starts_the_ranks(cluster: dict[str, str]) -> None:
    flags = ("--num_processes", "4", "--main_process_ip", "127.0.0.1")
    done = launched(cluster, "-N", "2", "-n", "2", flags=flags)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"torchrun {rank} 4 {rank % 2} 2 [0, 1, 2, 3]" for rank in range(4)]
    for number in (1, 2):
        assert f"accel: 2 machines from Slurm, this is machine {number}" in done.stderr


def test_a_contradiction_ends_every_launcher(cluster: dict[str, str]) -> None:
    done = launched(cluster, "-N", "2", "-n", "2", flags=("--num_machines", "3"))
    assert done.returncode == 2
    assert "--num_machines 3, but Slurm says 2" in done.stderr


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (("-N", "1", "-n", "2", "-O"), ()),
        (("-N", "2", "-n", "2"), ("--num_processes", "4", "--main_process_ip", "127.0.0.1")),
    ],
    ids=["one for each rank", "one for each machine"],
)
def test_doctors_of_a_job_check_one_world(
    cluster: dict[str, str], options: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    command = ["srun", *options, sys.executable, "-m", "accel_cli", "doctor", "--cpu", *flags]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=180)
    assert done.stdout.count("10 are right by gloo") == 1, done.stdout + done.stderr
    assert f"{4 if flags else 2} ranks on" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def state_of(environ: dict[str, str], job: str, name: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], env=environ, capture_output=True, text=True)
    return next((word.partition("=")[2] for word in shown.stdout.split() if word.startswith(f"{name}=")), "")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def submit(environ: dict[str, str], folder: Path, *words: str) -> tuple[str, Path]:
    flags = (
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--submit",
        "slurm",
    )
    command = [*LAUNCH, *flags, "--submit_output", str(folder / "job.log"), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("submitted job ")[1].split(";")[0], folder / "job.log"


def test_a_preempted_job_saves_is_requeued_and_resumes(cluster: dict[str, str], tmp_path: Path) -> None:
    words = ("--resume", "--submit_time", "30", str(HERE / "resumed.py"), str(tmp_path / "run"), "80")
    job, log = submit(cluster, tmp_path, *words)
    wait_until(lambda: log.exists() and "from step 0" in log.read_text(), f"job {job} did not start")
    time.sleep(3)
    subprocess.run(["scancel", "--signal=USR1", job], env=cluster, check=True)
    wait_until(lambda: state_of(cluster, job, "JobState") == "PENDING", f"job {job} was not requeued")
    # Slurm lets a requeued job wait for two minutes, unless it is told otherwise.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=cluster, check=True)
    wait_until(
        lambda: state_of(cluster, job, "JobState") == "COMPLETED", f"job {job} did not end: {log.read_text()}"
    )
    text = log.read_text()
    begun = [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "from step" in line]
    assert begun[0] == 0, text
    assert 0 < begun[-1] < 80, text
    assert "done after step 80" in text
    assert (state_of(cluster, job, "Restarts"), state_of(cluster, job, "ExitCode")) == ("1", "0:0")


def test_the_exit_code_of_a_job_is_that_of_the_rank(cluster: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit(7)\n")
    job, log = submit(cluster, tmp_path, str(script))
    wait_until(lambda: state_of(cluster, job, "JobState") == "FAILED", f"job {job}: {log}")
    assert state_of(cluster, job, "ExitCode") == "7:0"


def finish(environ: dict[str, str], job: str, log: Path, state: str = "COMPLETED") -> str:
    """Wait for the end of a job, and let it start at once when it is requeued: Slurm waits two minutes by itself."""

    def has_ended() -> bool:
        now = state_of(environ, job, "JobState")
        if now == "PENDING":
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environ, check=False)
        return now == state

    wait_until(has_ended, f"job {job} did not end as {state}: {log.read_text() if log.exists() else ''}")
    return log.read_text()


def training(folder: Path, steps: int, *crash: str) -> tuple[str, ...]:
    return (str(HERE / "submitted.py"), str(folder), str(steps), *crash)


def assert_equal_weights(folder: Path, other: Path, steps: int) -> None:
    """Compare with a run on one process that nothing happens to."""
    subprocess.run([sys.executable, *training(other, steps)], check=True, timeout=120)
    torch.testing.assert_close(
        torch.load(folder / "weights.pt"), torch.load(other / "weights.pt"), rtol=1e-12, atol=0
    )


def test_a_crash_costs_one_retry(cluster: dict[str, str], tmp_path: Path) -> None:
    words = ("--resume", "--submit_retries", "1", *training(tmp_path / "run", 20, "1", "15", "1"))
    job, log = submit(cluster, tmp_path, *words)
    text = finish(cluster, job, log)
    assert "a planted crash" in text
    assert "2 ranks from step 10" in text
    assert_equal_weights(tmp_path / "run", tmp_path / "other", 20)


def test_out_of_retries_a_job_fails_with_the_code_of_the_rank(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nprint('tried', flush=True)\nsys.exit(7)\n")
    job, log = submit(cluster, tmp_path, "--submit_retries", "1", str(script))
    text = finish(cluster, job, log, "FAILED")
    assert state_of(cluster, job, "ExitCode") == "7:0"
    assert text.count("tried") == 4, "two ranks, twice"


def test_a_job_that_loses_a_machine_starts_again(cluster: dict[str, str], tmp_path: Path) -> None:
    words = ("--resume", *training(tmp_path / "run", 60))
    job, log = submit(cluster, tmp_path, *words)
    wait_until(lambda: log.exists() and "step 15\n" in log.read_text(), f"job {job} did not start")
    down = ["scontrol", "update", "NodeName=node1"]
    subprocess.run([*down, "State=DOWN", "Reason=test"], env=cluster, check=True)
    wait_until(lambda: state_of(cluster, job, "JobState") == "PENDING", f"job {job} was not requeued")
    subprocess.run([*down, "State=RESUME"], env=cluster, check=False)  # unless slurmd has registered again
    text = finish(cluster, job, log)
    begun = [int(line.split("from step ")[1].split()[0]) for line in text.splitlines() if "from step" in line]
    assert begun[-1] > 0, text
    assert_equal_weights(tmp_path / "run", tmp_path / "other", 60)


def accel(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel_cli", "jobs", *words, "--engine", "slurm"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)


def test_jobs_are_listed_followed_and_cancelled(cluster: dict[str, str], tmp_path: Path) -> None:
    job, log = submit(cluster, tmp_path, *training(tmp_path / "run", 6))
    followed = accel(cluster, "logs", job, "--follow")
    assert "done after step 6" in followed.stdout, followed.stdout + followed.stderr
    (tmp_path / "second").mkdir()
    words = ("--submit_job_name", "long one", *training(tmp_path / "long", 900))
    other, log = submit(cluster, tmp_path / "second", *words)
    wait_until(lambda: log.exists() and "from step 0" in log.read_text(), f"job {other} did not start")
    listed = {one["id"]: one for one in json.loads(accel(cluster, "ls", "--json").stdout)}
    assert (listed[job]["state"], listed[job]["machines"]) == ("done", 2)
    assert (listed[other]["state"], listed[other]["name"]) == ("running", "long one")
    assert accel(cluster, "cancel", other).stdout == f"cancelled job {other}\n"
    wait_until(lambda: state_of(cluster, other, "JobState") == "CANCELLED", f"job {other} was not cancelled")
    refused = accel(cluster, "cancel", "999999")
    assert refused.returncode == 1
    assert "Invalid job id" in refused.stderr
