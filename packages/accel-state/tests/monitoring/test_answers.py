"""What a rank answers; the test is its launcher, with files, a named pipe and a signal, and no monitor of ours."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel_state.monitoring.answers import STACK_SIGNAL, attach, heartbeat, last_of_groups, training_heartbeat
from accel_state.monitoring.heartbeat import HeartbeatFile
from testkit import worlds

pytestmark = pytest.mark.skipif(
    STACK_SIGNAL is None or not hasattr(os, "mkfifo"), reason="real-time signals and named pipes"
)

HEAD = """
import os, signal, sys, time
from accel_state.monitoring.answers import STACK_SIGNAL, attach, explain_by, heartbeat, training_heartbeat
def inner():
    print("ready", flush=True)
    sys.stdin.readline()
def outer():
    inner()
"""


@pytest.fixture
def folder(tmp_path):
    """A launcher's folder for two ranks."""
    HeartbeatFile.create(tmp_path / "heart", 2, timed=False)
    for rank in range(2):
        os.mkfifo(tmp_path / f"ask.{rank}")
    return tmp_path


@contextmanager
def started(folder, body, rank=1):
    """A rank that runs this code until its standard input ends; no time-out hides one that does not."""
    environ = {**os.environ, "ACCEL_RUN_FOLDER": str(folder), "RANK": str(rank)}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", HEAD + body]
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.005)
    return found


def listening(pipe):
    """A descriptor that writes to a named pipe; None: nobody reads there yet."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def ask(folder, rank):
    """The answer to one request, as the launcher makes it."""
    path = folder / f"answer.{rank}"
    path.unlink(missing_ok=True)
    pipe = until(lambda: listening(folder / f"ask.{rank}"))
    os.write(pipe, b"?")
    os.close(pipe)
    until(path.exists)
    answer = json.loads(path.read_text(encoding="utf-8"))
    assert answer.keys() == {"collectives", "recorded"}
    return answer["collectives"]


def test_a_rank_shows_its_stack_and_its_collectives(folder):
    lines = """
asked = []
def describe():
    asked.append(1)
    return [f"all_reduce, asked {len(asked)} times"]
explain_by(describe)
explain_by(lambda: ["broadcast"])
assert attach(os.environ) is attach(os.environ) is heartbeat() is not None
outer()
print(STACK_SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    with started(folder, lines) as rank:
        assert rank.stdout.readline() == "ready\n"
        assert HeartbeatFile(folder / "heart").read(1).pid == rank.pid
        stack = folder / "stack.1"
        assert stack.read_bytes() == b"", "a rank that nobody asks writes nothing"
        # The rank is blocked in a read, which goes on afterwards.
        rank.send_signal(STACK_SIGNAL)
        text = until(lambda: (found := stack.read_text()).count("<module>") and found)
        assert [line.split()[-1] for line in text.splitlines() if "<string>" in line] == [
            "inner",
            "outer",
            "<module>",
        ]
        assert text.count("most recent call first") == 1, "of the main thread alone"
        assert ask(folder, 1) == ["all_reduce, asked 1 times", "broadcast"]
        assert ask(folder, 1) == ["all_reduce, asked 2 times", "broadcast"]
        assert rank.communicate("\n", timeout=60)[0] == "False\n"
        assert rank.returncode == 0
    assert not list(folder.glob("*.new"))


def test_what_cannot_be_described_is_said_and_the_next_request_is_answered(folder):
    lines = """
def describe():
    raise RuntimeError("dictionary changed size during iteration")
explain_by(describe)
explain_by(lambda: ["broadcast"])
attach(os.environ)
outer()
"""
    with started(folder, lines) as rank:
        assert rank.stdout.readline() == "ready\n"
        for _ in range(2):
            assert ask(folder, 1) == [
                "unknown: RuntimeError: dictionary changed size during iteration",
                "broadcast",
            ]
        rank.communicate("\n", timeout=60)


def test_a_rank_without_torch_waits_in_no_collective(folder):
    with started(folder, "attach(os.environ)\nouter()\nprint('torch' in sys.modules)") as rank:
        rank.stdout.readline()
        assert ask(folder, 1) == []
        assert rank.communicate("\n", timeout=60)[0] == "False\n", "an answer loads no torch"


@pytest.mark.parametrize("timed", [False, True])
def test_steps_are_told_only_to_a_launcher_that_wants_them(tmp_path, timed):
    HeartbeatFile.create(tmp_path / "heart", 2, timed=timed)
    os.mkfifo(tmp_path / "ask.1")
    lines = """
assert training_heartbeat() is None
attach(os.environ)
print(training_heartbeat() is heartbeat(), training_heartbeat() is None)
"""
    with started(tmp_path, lines) as rank:
        assert rank.communicate(timeout=60)[0] == f"{timed} {not timed}\n"


def test_the_record_of_a_rank_is_not_that_of_a_process_it_forks(folder):
    lines = """
attach(os.environ)
child = os.fork()
if child == 0:
    os._exit(0 if heartbeat() is training_heartbeat() is attach(os.environ) is None else 1)
print(os.waitpid(child, 0)[1], heartbeat() is not None)
"""
    with started(folder, lines) as rank:
        assert rank.communicate(timeout=60)[0] == "0 True\n"


def test_a_place_that_is_taken_is_left_to_its_owner(folder):
    heart = HeartbeatFile(folder / "heart")
    heart.claim(1)
    # Two ranks exist: the claim of rank 7 fails too.
    lines = """
print(attach(os.environ), heartbeat())
print(attach({**os.environ, "RANK": "7"}))
os.kill(os.getpid(), STACK_SIGNAL)
outer()
"""
    with started(folder, lines) as rank:
        assert rank.communicate("\n", timeout=60)[0] == "None None\nNone\nready\n"
        assert rank.returncode == 0, "the signal does not end a rank that was refused"
    assert heart.read(1).pid == os.getpid()
    assert (folder / "stack.1").read_bytes() == b""


def test_without_a_launcher_nothing_happens(tmp_path):
    before = signal.getsignal(STACK_SIGNAL)
    assert attach({}) is None
    assert attach({"RANK": "0"}) is None
    gone = tmp_path / "gone"  # the launcher has ended
    assert attach({"ACCEL_RUN_FOLDER": str(gone), "RANK": "0"}) is None
    assert heartbeat() is None
    assert training_heartbeat() is None
    assert not gone.exists()
    assert signal.getsignal(STACK_SIGNAL) == before


def test_a_rank_goes_on_when_its_launcher_is_gone(folder):
    lines = """
attach(os.environ)
outer()
import threading
end = time.monotonic() + 60
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.005)
print([thread.name for thread in threading.enumerate()][1:])
"""
    with started(folder, lines) as rank:
        rank.stdout.readline()
        ask(folder, 1)
        until(lambda: not (folder / "answer.1.new").exists())
        pipe = until(lambda: listening(folder / "ask.1"))
        shutil.rmtree(folder)
        os.close(pipe)
        assert rank.communicate("\n", timeout=60)[0] == "[]\n", "its thread has ended"
        assert rank.returncode == 0


def waiting(folder):
    """Rank 0 waits for rank 1 in a collective that torch knows, and is asked."""
    import torch
    import torch.distributed as dist

    # Of torch's own process group: no PartialState, whose channels know more.
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), None
    if rank == 0:
        attach(os.environ)
        before = ask(Path(folder), 0)
        work = dist.all_reduce(torch.ones(3, 2), async_op=True)
        found = before, ask(Path(folder), 0), torch._C._distributed_c10d._dump_fr_trace_json(True, False)
        (Path(folder) / "go").touch()
        work.wait()
        until(lambda: ask(Path(folder), 0) == [])  # torch notes the end of it in a thread of its own
    else:
        until((Path(folder) / "go").exists)
        dist.all_reduce(torch.ones(3, 2))
    return found


def test_torchs_flight_recorder_tells_of_other_process_groups(folder):
    environ = {"TORCH_FR_BUFFER_SIZE": "10", "ACCEL_RUN_FOLDER": str(folder)}
    (before, found, dumped), _ = worlds.run(waiting, 2, str(folder), environ=environ)
    if not json.loads(dumped)["entries"]:
        pytest.skip("this version of torch does not record the collectives of gloo")
    assert (before, found) == ([], ["all_reduce (#1 of gloo; Float 3x2)"])


def recording():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], group_desc="pair")
    for size in (3, 5):
        dist.all_reduce(torch.ones(size))
    dist.broadcast(torch.ones(2, 2, dtype=torch.int64), 0, group=pair)
    if dist.get_rank() == 0:
        dist.send(torch.ones(9), 1)
    else:
        dist.recv(torch.ones(9), 0)
    return torch._C._distributed_c10d._dump_fr_trace_json(True, False)


def test_the_last_collective_of_each_group_is_told():
    entries = json.loads(worlds.run(recording, 2)[1])["entries"]
    if not entries:
        pytest.skip("this version of torch does not record the collectives of gloo")
    assert [(number, text) for _, number, text in last_of_groups(entries)] == [
        (2, "all_reduce (Float 5)"),
        (1, "broadcast (Long 2x2)"),
    ]
    groups = [group for group, _, _ in last_of_groups(entries)]
    assert ("default_pg gloo" in groups[0], "pair gloo" in groups[1]) == (True, True), groups
    assert last_of_groups([]) == []
    many = [{**entries[0], "process_group": [str(number), ""]} for number in range(100)]
    assert [group for group, _, _ in last_of_groups(many)] == [f"{number} gloo" for number in range(84, 100)]
