"""The coordinator of the doctor's world: which ranks it starts, whom it waits for, and whom it names.

Threads play the ranks, on the real store; tests-integration/test_doctor.py runs real ones.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from accel_cli.doctor import world as module
from accel_cli.doctor.checks import Finding
from accel_cli.doctor.world import RankPlace, examine_world
from accel_state.config.launch import LaunchConfig
from accel_state.errors import LaunchError, PortError
from accel_state.launching.plan import World

CONFIG = LaunchConfig(use_cpu=True)


class Process:
    """A started rank; ``end`` is how it ends."""

    def __init__(self, rank, argv, environ):
        self.rank, self.argv, self.environ = rank, argv, environ
        self.job = json.loads(argv[-1])
        self.pid = os.getpid()
        self.killed = False
        self.end = None

    def poll(self):
        return self.end

    def kill(self):
        self.killed, self.end = True, -9


class Rank:
    """What a played rank can do, in the order of a real one."""

    def __init__(self, number, port, process):
        self.number, self.process = number, process
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20))

    def arrive(self, host):
        facts = {"host": host, "pid": 100 + self.number, "torch": "2.13", "accel": "1", "python": "3.11"}
        self.store.set(f"arrived/{self.number}", json.dumps(facts))
        self.store.add("arrived", 1)
        self.store.wait(["start"])

    def tell_time(self, ahead=0.0, late=()):
        for number in range(5):
            self.store.wait([f"clock/{self.number}/{number}/ask"])
            answer = time.time() + ahead
            time.sleep(0.8 if number in late else 0)
            self.store.set(f"clock/{self.number}/{number}/answer", repr(answer))

    def enter(self, step):
        self.store.set(f"at/{self.number}", step)
        self.store.add("steps", 1)

    def report(self, **more):
        self.store.set(f"result/{self.number}", json.dumps(result(self.number, **more)))
        self.store.add("ended", 1)

    def leave(self):
        self.store.wait(["verdict"])
        if self.process is not None:
            self.process.end = 0


def result(rank, **more):
    collectives = {"all_reduce": {"problem": "", "seconds": 0.002}}
    return {"rank": rank, "compute": 0.01, "backend": "gloo", "collectives": collectives, "links": [], **more}


@pytest.fixture
def play(monkeypatch):
    """Examine a world whose ranks are functions of a ``Rank``, by number; those of this machine are started."""
    threads, errors, over = [], [], threading.Event()
    monkeypatch.setattr(module, "_GRACE", 1.0)

    def act(script, number, port, process):
        try:
            script(Rank(number, port, process))
        except dist.DistError as error:
            if not over.wait(20):  # a store that goes away is right only if the coordinator has ended
                errors.append(error)
        except Exception as error:  # the test raises it
            errors.append(error)

    def run(scripts, size, local_size, timeout=20.0):
        started = []

        def start(rank, argv, environ, **options):
            process = Process(rank, argv, environ)
            here = {rank: process}
            if not started:  # the other machines know the port
                here |= dict.fromkeys(range(local_size, size))
            started.append(process)
            for number, own in here.items():
                arguments = (scripts[number], number, process.job["port"], own)
                threads.append(threading.Thread(target=act, args=arguments, daemon=True))
                threads[-1].start()
            return process

        monkeypatch.setattr(module, "start_command", start)
        place = RankPlace(World(size, local_size, size // local_size, 0, True), 0, local_size, "127.0.0.1", 0)
        try:
            findings, measured = examine_world(CONFIG, place, {}, timeout)
        finally:
            over.set()
        return findings, measured, started

    yield run
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def healthy(host, leads=True, **clock):
    def script(rank):
        rank.arrive(host)
        if leads:
            rank.tell_time(**clock)
        rank.report()
        rank.leave()

    return script


def absent(rank):
    pass


def problems(findings):
    return [finding.found for finding in findings if finding.status == "problem"]


def test_a_healthy_world_is_measured(play):
    scripts = {0: healthy("a"), 1: healthy("a", leads=False), 2: healthy("b", ahead=100.0, late=(0, 4))}
    scripts[3] = healthy("b", leads=False)
    findings, measured, started = play(scripts, 4, 2)
    assert problems(findings) == []
    assert measured["silent"] == []
    assert measured["results"] == {rank: result(rank) for rank in range(4)}
    assert {rank: facts["host"] for rank, facts in measured["ranks"].items()} == {
        0: "a",
        1: "a",
        2: "b",
        3: "b",
    }
    # Once for each machine; of five answers the quickest counts: those that are 0.8 s late are wrong by 0.4 s.
    assert list(measured["clock_offsets"]) == ["0", "2"]
    assert measured["clock_offsets"]["0"] == pytest.approx(0, abs=0.2)
    assert measured["clock_offsets"]["2"] == pytest.approx(100, abs=0.2)
    warnings = [finding.found for finding in findings if finding.topic == "clocks"]
    assert len(warnings) == 1
    assert warnings[0].startswith(("b is 100.", "b is 99."))
    assert [process.killed for process in started] == [False, False]


def test_a_rank_may_take_its_time_to_end(play):
    def slow_end(rank):
        rank.arrive("a")
        rank.tell_time()
        rank.report()
        rank.store.wait(["verdict"])
        time.sleep(0.5)
        rank.process.end = 0

    started = play({0: slow_end}, 1, 1)[2]
    assert not started[0].killed


@pytest.mark.wide
def test_steps_renew_the_patience(play):
    def slow(rank):
        rank.arrive("a")
        rank.tell_time()
        for step in ("all_reduce", "broadcast"):
            rank.enter(step)
            time.sleep(1.7)  # together longer than the 3 s that a rank may be silent
        rank.report()
        rank.leave()

    findings, measured, _ = play({0: slow}, 1, 1, timeout=2.0)
    assert measured["silent"] == []
    assert problems(findings) == []


def test_ranks_that_do_not_arrive_are_named_with_their_machine(play):
    scripts = {0: healthy("a"), 1: absent, 2: absent, 3: absent}
    began = time.monotonic()
    (finding,), measured, started = play(scripts, 4, 2, timeout=2.0)
    assert time.monotonic() - began >= 2.0
    assert (finding.topic, finding.status) == ("world", "problem")
    assert finding.found == "rank 1, 2, 3 of 4 did not arrive within 2 s: machine 1 of 2 is missing"
    assert finding.advice.startswith("arrived: a. Start accel doctor on each machine with its --machine_rank")
    assert "127.0.0.1 can be reached" in finding.advice
    assert measured["missing"] == [1, 2, 3]
    assert list(measured["arrived"]) == [0]
    assert [process.killed for process in started] == [True, True]


@pytest.mark.parametrize(
    ("end", "told"), [(5, "ended with exit code 5"), (-signal.SIGSEGV, "ended by SIGSEGV")]
)
def test_a_rank_that_ends_before_it_arrives_is_not_waited_for(play, end, told):
    def ends(rank):
        rank.store.wait(["arrived/0"])
        rank.process.end = end

    began = time.monotonic()
    (finding,), _, started = play({0: healthy("a"), 1: ends}, 2, 2, timeout=60.0)
    assert time.monotonic() - began < 30
    assert finding.found == f"rank 1 of 2 did not arrive within 60 s (rank 1 {told})"
    assert finding.advice == "the error of that rank is above"
    assert [process.killed for process in started] == [True, False]


@pytest.mark.parametrize("step", ["broadcast", None])
def test_a_rank_that_dies_is_named_before_those_that_notice(play, step):
    gone = threading.Event()

    def dies(rank):
        rank.arrive("b")
        if step:
            rank.enter(step)
        rank.process.end = -9
        gone.set()

    def notices(rank):
        rank.arrive("a")
        rank.tell_time()
        gone.wait()
        rank.report(error="broadcast: Connection closed by peer")
        rank.leave()

    began = time.monotonic()
    findings, measured, _ = play({0: notices, 1: dies}, 2, 2, timeout=60.0)
    assert time.monotonic() - began < 30
    assert problems(findings) == [
        f"rank 1 on b ended by SIGKILL, last seen at: {step or 'the start'}",
        "rank 0 on a failed at broadcast: Connection closed by peer",
    ]
    assert findings[0].advice.startswith("look at process 101 there")
    assert measured["silent"] == [1]


@pytest.mark.full
def test_a_silent_rank_of_another_machine_is_named_after_the_timeout(play):
    def silent(rank):
        rank.arrive("b")
        rank.tell_time()
        rank.enter("links, round 2")

    findings, measured, started = play({0: healthy("a"), 1: silent}, 2, 1, timeout=2.0)
    assert problems(findings) == ["rank 1 on b does not answer, last seen at: links, round 2"]
    assert measured["silent"] == [1]
    assert [process.rank for process in started] == [0]


@pytest.mark.wide
def test_a_stopped_rank_is_named(play):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)

        def stopped(rank):
            rank.process.pid = sleeper.pid
            rank.arrive("a")
            rank.enter("barrier")

        findings, _, _ = play({0: healthy("a"), 1: stopped}, 2, 2, timeout=2.0)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert problems(findings) == ["rank 1 on a is stopped (SIGSTOP), last seen at: barrier"]


@pytest.mark.full
def test_a_rank_that_does_not_tell_the_time_is_the_only_one_named(play):
    def silent(rank):
        rank.arrive("b")

    def waits(rank):
        rank.arrive("a")
        rank.tell_time()
        rank.enter("connecting all ranks")
        time.sleep(2.2)  # until its own timeout, which begins after that of the question for the time
        rank.report(error="connecting all ranks: timed out")
        rank.leave()

    findings, measured, _ = play({0: waits, 1: silent}, 2, 1, timeout=2.0)
    assert problems(findings) == [
        "rank 1 on b does not answer, last seen at: the start",
        "rank 0 on a failed at connecting all ranks: timed out",
    ]
    assert measured["silent"] == [1]
    assert measured["clock_offsets"] == {}


@pytest.fixture
def follow(monkeypatch):
    """What a doctor of machine 1 says, and what it started, when its ranks 2 and 3 end with these codes."""

    def run(*codes, environ=None, config=CONFIG):
        started = []

        def start(rank, argv, environ, **options):
            started.append(Process(rank, argv, environ))
            started[-1].end = codes[rank - 2]
            return started[-1]

        monkeypatch.setattr(module, "start_command", start)
        place = RankPlace(World(4, 2, 2, 1, True), 2, 2, "10.0.0.1", 29512)
        findings, measured = examine_world(config, place, environ or {}, 8.0)
        assert measured == {}
        (finding,) = findings
        return finding, started

    return run


def test_ranks_are_started_with_their_place(follow):
    _, started = follow(0, 0, environ={"KEPT": "1", "RANK": "7", "MASTER_PORT": "1"})
    for process, local in zip(started, (0, 1), strict=True):
        assert process.argv[:3] == (sys.executable, "-m", "accel_cli.doctor.rank")
        assert process.job == {
            "rank": 2 + local, "size": 4, "local_rank": local, "address": "10.0.0.1", "port": 29512,
            "timeout": 8.0, "cpu": True,
        }  # fmt: skip
        wanted = {
            "KEPT": "1", "RANK": str(2 + local), "LOCAL_RANK": str(local), "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        assert {name: process.environ.get(name) for name in wanted} == wanted
        assert "MASTER_PORT" not in process.environ  # the ranks meet at the coordinator's store


def test_the_number_of_threads_that_is_configured_is_kept(follow):
    _, started = follow(0, 0, config=LaunchConfig(use_cpu=True, num_cpu_threads_per_process=6))
    assert [process.environ["OMP_NUM_THREADS"] for process in started] == ["6", "6"]


@pytest.mark.parametrize(
    ("codes", "status", "found", "advice"),
    [
        ((0, 0), "ok", "ranks 2 to 3 took part; machine 0 (10.0.0.1) has the report", ""),
        (
            (0, 1),
            "problem",
            "failed on rank 3 of this machine",
            "the doctor of machine 0 (10.0.0.1) says why",
        ),
        (
            (1, -9),
            "problem",
            "failed on rank 2, 3 of this machine",
            "the doctor of machine 0 (10.0.0.1) says why",
        ),
    ],
)
def test_another_machine_says_what_became_of_its_ranks(follow, codes, status, found, advice):
    assert follow(*codes)[0] == Finding("world", status, found, advice)


@pytest.mark.parametrize("codes", [(3, 3), (1, 3)])
def test_another_machine_says_that_the_first_does_not_answer(follow, codes):
    finding, _ = follow(*codes)
    assert (finding.status, finding.found) == ("problem", "machine 0 did not answer at 10.0.0.1:29512")
    assert "--main_process_port" in finding.advice


def test_a_port_in_use_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(module, "start_command", lambda *args, **kwargs: pytest.fail("a rank was started"))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = RankPlace(World(2, 2, 1, 0, True), 0, 2, "127.0.0.1", port)
        with pytest.raises(PortError, match=f"port {port} cannot be used on this host"):
            examine_world(CONFIG, place, {}, 5.0)


def test_ranks_are_ended_if_a_later_one_cannot_start(monkeypatch):
    started = []

    def start(rank, argv, environ, **options):
        if rank == 1:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(Process(rank, argv, environ))
        return started[-1]

    monkeypatch.setattr(module, "start_command", start)
    place = RankPlace(World(3, 3, 1, 0, True), 0, 3, "127.0.0.1", 0)
    with pytest.raises(LaunchError, match=r"could not be started: .*Resource temporarily unavailable"):
        examine_world(CONFIG, place, {}, 5.0)
    assert [(process.rank, process.killed) for process in started] == [(0, True)]
