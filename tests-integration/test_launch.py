"""Real worlds of torch processes, by every way of starting them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testkit import worlds

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

from accel_state import PartialState

state = PartialState()
total = torch.tensor([state.process_index + 1.0])
dist.all_reduce(total)
# One write: launchers that let ranks share a stream may mix what comes in parts.
sys.stdout.write(f"rank {state.process_index} of {state.num_processes} sum {total.item()} {sys.argv[1:]}\\n")
if "fail" in sys.argv and state.process_index == 1:
    raise ValueError("rank 1 gives up")
if "fail" in sys.argv:
    dist.barrier()  # waits for a rank that never comes
"""


def environ():
    found = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return found | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "ACCELERATE_USE_CPU": "true",
    }


def run(*words, timeout=120, cwd=None):
    return subprocess.run(
        [sys.executable, *words], env=environ(), cwd=cwd, capture_output=True, text=True, timeout=timeout
    )


def accel(*words, **options):
    return run("-m", "accel_cli", "launch", *words, **options)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_t14_two_ranks_on_the_cpu_are_one_world(script):
    done = accel("--cpu", "--num_processes", "2", script, "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] rank {rank} of 2 sum 3.0 ['--lr', '1']" for rank in (0, 1)
    ]


def test_one_process_is_a_world_of_one(tmp_path):
    script = tmp_path / "one.py"
    script.write_text(
        "from accel_state import PartialState\nstate = PartialState()\n"
        "print(state.num_processes, state.distributed_type.value)\n"
    )
    done = accel("--cpu", str(script))
    assert done.stdout.split() == ["1", "NO"], done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        pytest.param(
            ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--use_env", "--master_port", "PORT"],
            marks=pytest.mark.full,
        ),
    ],
    ids=["torchrun", "torch.distributed.launch"],
)
def test_torchs_own_launchers_start_the_same_script(script, launcher):
    words = [str(worlds.free_port()) if word == "PORT" else word for word in launcher]
    done = run(*words, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 sum 3.0 []" for rank in (0, 1)]


def test_a_failing_rank_ends_the_one_that_waits_for_it(script):
    started = time.monotonic()
    done = accel("--cpu", "--num_processes", "2", script, "fail")
    assert time.monotonic() - started < 60
    assert done.returncode == 1
    assert "rank 1 failed first (exit code 1)" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: rank 1 gives up")


@pytest.mark.wide
def test_ranks_end_cleanly_without_asking_for_it(script):
    # torch's gloo threads abort a process that ends with its group still there, now and then.
    for _ in range(3):
        done = accel("--cpu", "--num_processes", "2", script)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.wide
def test_t30_two_concurrent_launches_pass(script):
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", script]
    both = [
        subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(out.splitlines()) == 2


@pytest.mark.wide
@pytest.mark.parametrize("backend", [pytest.param("static", marks=pytest.mark.full), "c10d"])
def test_two_machines_are_one_world(script, backend, tmp_path):
    port = str(worlds.free_port())
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def machine(rank):
        words = ["--cpu", "--num_processes", "4", "--num_machines", "2", "--machine_rank", str(rank)]
        words += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--rdzv_backend", backend]
        return subprocess.Popen(
            [sys.executable, "-m", "accel_cli", "launch", *words, script, "x"],
            env={**environ(), "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    both = [machine(0), machine(1)]
    ends = [(*process.communicate(timeout=150), process.returncode) for process in both]
    assert [code for *_, code in ends] == [0, 0], ends
    lines = sorted(line for out, *_ in ends for line in out.splitlines())
    assert lines == [f"rank {rank} of 4 sum 10.0 ['x']" for rank in range(4)]
    assert list(temporary.iterdir()) == []


@pytest.mark.wide
def test_the_agent_returns_the_code_of_the_failed_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(60)\n")
    port = str(worlds.free_port())
    words = ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1"]
    words += ["--cpu", "--main_process_port", port]
    other = subprocess.Popen(
        [sys.executable, "-m", "accel_cli", "launch", *words, "--machine_rank", "1", str(script)],
        env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    done = accel(*words, "--machine_rank", "0", str(script))
    assert done.returncode == 9
    assert "rank 1 failed first, with exit code 9" in done.stderr
    assert other.wait(timeout=60) == 76, "its ranks, which notice nothing, are ended"


def test_a_taken_port_of_the_first_machine_is_found_before_torch_starts(script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
        started = time.monotonic()
        done = accel("--cpu", *words, "--main_process_port", port, script)
    assert time.monotonic() - started < 5
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


FAKE_MPIRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    print("mpirun (Open MPI) 4.1.4")
    sys.exit(0)
size = int(words[words.index("-n") + 1])
command = words[words.index({python!r}):]
ranks = [
    subprocess.Popen(command, env=os.environ | {{
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }})
    for rank in range(size)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def mpi(tmp_path, monkeypatch):
    tool = tmp_path / "bin/mpirun"
    tool.parent.mkdir()
    tool.write_text(FAKE_MPIRUN.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    return str(hosts)


def test_mpirun_starts_a_world(script, mpi):
    done = accel("--cpu", "--num_processes", "2", "--mpirun_hostfile", mpi, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 sum 3.0 []" for rank in (0, 1)]


def test_what_mpi_lacks_is_named(script, mpi, tmp_path, monkeypatch):
    done = accel("--cpu", "--num_processes", "2", "--mpirun_hostfile", "nowhere", script, cwd=tmp_path)
    assert (done.returncode, "hostfile 'nowhere' does not exist" in done.stderr) == (2, True)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    done = accel("--cpu", "--num_processes", "2", "--mpirun_hostfile", mpi, script)
    assert (done.returncode, "mpirun was not found" in done.stderr) == (2, True)
