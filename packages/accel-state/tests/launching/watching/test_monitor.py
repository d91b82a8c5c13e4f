"""Time-outs and reports of a run, with real ranks that do not load torch."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError
from accel_state.launching.run import launch
from accel_state.launching.target import Target
from accel_state.launching.watching.monitor import CAN_WATCH, Limits, Monitor
from accel_state.monitoring.answers import STACK_SIGNAL
from accel_state.monitoring.heartbeat import HeartbeatFile

pytestmark = pytest.mark.skipif(not CAN_WATCH, reason="real-time signals and /proc of Linux")

JOIN = """
from accel_state.monitoring.answers import heartbeat
from accel_state.monitoring.heartbeat import DATA
pulse = heartbeat()
open("folder", "w").write(os.environ["ACCEL_RUN_FOLDER"])
def loop():
    while True:
        pass
def sleeper(ready=None):
    ready and os.close(os.open(ready, os.O_CREAT)); time.sleep(100)
"""


@pytest.fixture
def launcher(launcher, tmp_path):
    yield launcher
    told = tmp_path / "folder"
    assert not told.exists() or not Path(told.read_text()).exists()


def run(launcher, *flags, body):
    return launcher.run("--num_processes", "2", "--grace_period", "2", *flags, launcher.script(JOIN + body))


def test_ranks_without_progress_are_shown_and_ended(launcher):
    done = run(launcher, "--step_timeout", "1.5", body="pulse.joined(); sleeper() if rank == 0 else loop()\n")
    assert done.returncode == 124, done.stderr
    assert "no rank has made progress for 1.5 s (--step_timeout); ending all ranks" in done.stderr
    for rank, name, line in ((0, "sleeper", r".*time.sleep\(100\)"), (1, "loop", "(pass|while True:)")):
        part = done.stderr.split(f"rank {rank} is in no collective, at ")[1]
        assert re.search(f", in {name}\n    {line}", part.split("rank 1 is in")[0])
    assert "failed" not in done.stderr, "that they end is not an error of theirs"


@pytest.mark.wide
def test_progress_of_one_rank_is_progress(launcher):
    body = "pulse.joined()\nif rank == 0:\n    for _ in range(30):\n        time.sleep(0.1); pulse.beat()\n"
    done = run(launcher, "--step_timeout", "2", body=body)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_does_not_join_is_shown_before_it_has_loaded_anything(launcher):
    done = run(launcher, "--start_timeout", "1", body="pulse.joined() if rank == 0 else None\nsleeper()\n")
    assert done.returncode == 124
    assert "rank 1 has not joined the other ranks within 1 s (--start_timeout)" in done.stderr
    assert "(it has not joined the other ranks)" in done.stderr
    assert "in sleeper" in done.stderr


@pytest.mark.full
def test_a_save_has_a_time_out_of_its_own(launcher):
    body = "pulse.joined()\nwith pulse.saving():\n    time.sleep(3 if 'short' in sys.argv else 100)\n"
    script = launcher.script(JOIN + body)
    flags = ("--num_processes", "2", "--grace_period", "2", "--step_timeout", "2")
    assert launcher.run(*flags, script, "short").returncode == 0
    done = launcher.run(*flags, "--checkpoint_timeout", "1", script)
    assert done.returncode == 124
    assert "been saving for more than 1 s (--checkpoint_timeout); ending all ranks" in done.stderr


def test_a_stalled_run_is_restarted(launcher):
    body = (
        "pulse.joined()\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sleeper()\nprint('over')\n"
    )
    done = run(launcher, "--step_timeout", "1", "--max_restarts", "1", body=body)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over") == 2
    assert "restarting all ranks (1 of 1)" in done.stderr


@pytest.mark.wide
def test_a_rank_that_ignores_the_end_is_killed(launcher):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\npulse.joined()\nsleeper()\n"
    done = run(launcher, "--step_timeout", "1", body=body)
    assert done.returncode == 124
    assert "did not exit in time; killing" in done.stderr


@pytest.mark.wide
def test_a_single_rank_is_watched_too(launcher):
    done = launcher.run("--step_timeout", "1", launcher.script(JOIN + "pulse.joined()\nsleeper()\n"))
    assert done.returncode == 124
    assert "in sleeper" in done.stderr


def started(launcher, *flags, body):
    """A launch whose ranks have come to the end of ``body``."""
    script = launcher.script(JOIN + body + "\nsleeper(f'ready_{rank}')\n")
    process = launcher.start("--num_processes", "2", "--grace_period", "2", *flags, script)
    end = time.monotonic() + 20
    while len(list(launcher.folder.glob("ready_*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


ATTACH = "from accel_state.monitoring.answers import attach\nattach(os.environ)\n"


def test_the_launcher_tells_on_request_where_ranks_are_and_goes_on(launcher):
    process = started(launcher, body=ATTACH)
    process.send_signal(signal.SIGUSR2)
    err = ""
    while "in sleeper" not in err and (line := process.stderr.readline()):
        err += line
    assert process.poll() is None
    process.terminate()
    err += process.communicate(timeout=20)[1]
    assert process.returncode == 143
    assert "SIGUSR2 received: this is where the ranks are" in err
    assert "ranks 0 and 1 are in no collective, at " in err


def test_a_request_that_is_passed_on_belongs_to_the_ranks(launcher):
    body = "signal.signal(signal.SIGUSR2, lambda *_: os._exit(5))\n"
    process = started(launcher, "--signals_to_handle", "SIGUSR2", body=body)
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 5
    assert "where the ranks are" not in err


@pytest.mark.full
def test_a_suspended_run_does_not_stall(launcher):
    process = started(launcher, "--step_timeout", "4", body="pulse.joined()")
    process.send_signal(signal.SIGTSTP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert process.poll() is None, process.communicate()[1]
    assert process.wait(timeout=20) == 124
    process.communicate()


def test_a_killed_launcher_leaves_no_folder(launcher):
    process = started(launcher, "--step_timeout", "60", body="pulse.joined()")
    folder = Path((launcher.folder / "folder").read_text())
    assert folder.is_dir()
    process.kill()
    process.communicate(timeout=20)
    end = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_machines_without_a_store_of_torch_cannot_be_watched(launcher):
    done = launcher.run(
        "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1",
        "--main_process_port", "29500", "--rdzv_backend", "etcd", "--step_timeout", "5", launcher.script("")
    )  # fmt: skip
    assert done.returncode != 0
    assert "--step_timeout: the machines exchange" in done.stderr
    assert "--rdzv_backend etcd does not have; pass --rdzv_backend c10d" in done.stderr


def test_ranks_of_a_scheduler_cannot_be_watched(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    config = resolve(environ={}, flags=parse_flags(["--cpu", "--step_timeout", "5"]), use_default_file=False)
    with pytest.raises(ConfigError, match="--step_timeout: another program starts the ranks of this run"):
        launch(config.local(), Target(str(script)), {}, joins=True)


@pytest.mark.wide
def test_being_asked_does_no_harm_to_busy_threads_or_to_a_rank_that_ends():
    code = """
import os, threading, time
from accel_state.monitoring.answers import attach
def descend(depth):
    return depth and descend(depth - 1)
def work():
    while True:
        descend(20)
        exec("def f(): pass\\nf()", {})
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
attach(os.environ).joined()
time.sleep(2)
raise SystemExit(7)
"""
    monitor = Monitor(range(1), Limits(step=1))
    try:
        monitor.begin()
        environ = os.environ | {"ACCEL_RUN_FOLDER": str(monitor.folder)}
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        with subprocess.Popen([sys.executable, "-c", code], env=environ) as rank:
            heart = HeartbeatFile(monitor.folder / "heart")
            while rank.poll() is None:
                if heart.read(0).pid:
                    rank.send_signal(STACK_SIGNAL)
                time.sleep(0.001)
        assert rank.returncode == 7
    finally:
        monitor.close()


@pytest.mark.wide
def test_a_process_that_is_stopped_does_not_answer(tmp_path):
    monitor = Monitor(range(1), Limits(step=1))
    try:
        monitor.begin()
        code = (
            "import os, time\nfrom accel_state.monitoring.answers import attach\n"
            "attach(os.environ).joined()\nprint(1, flush=True)\ntime.sleep(60)"
        )
        environ = {
            **os.environ,
            "ACCEL_RUN_FOLDER": str(monitor.folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE) as rank:
            rank.stdout.readline()
            assert re.search(r"rank 0 is in no collective, at <string>:[45]", monitor.hang_report([0]))
            rank.send_signal(signal.SIGSTOP)
            assert "rank 0 does not answer" in monitor.hang_report([0])
            rank.kill()
        assert monitor.hang_report([0]).startswith("rank 0 "), "a rank that has just ended is no error"
    finally:
        monitor.close()
    assert not monitor.folder.exists()
