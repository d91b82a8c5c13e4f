"""A command that runs as a part of another: it is waited for after Ctrl-C, and gets each signal once."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from testkit.terminals import CTRL_C, Terminal

pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals and signals of POSIX systems")

DRIVER = """
import os, sys
from accel_state.launching.ranks.command import run_command
sys.exit(run_command((sys.executable, "-c", sys.argv[1]), dict(os.environ)) % 256)
"""


def command(body):
    return [sys.executable, "-c", DRIVER, "import os, signal, sys, time\n" + textwrap.dedent(body)]


def environ():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


SLOW_TO_END = """
    got = []
    signal.signal(signal.SIGINT, lambda n, f: got.append(n))
    print("ready", flush=True)
    while not got:
        time.sleep(0.01)
    time.sleep(0.7)  # longer than subprocess waits for a child after Ctrl-C
    open("ended", "w").write(str(len(got)))
"""


def test_ctrl_c_in_a_terminal_arrives_once_and_the_end_is_waited_for(tmp_path):
    with Terminal(command(SLOW_TO_END), environ(), str(tmp_path)) as terminal:
        terminal.wait_for("ready")
        terminal.send(CTRL_C)
        terminal.wait_for_end()
        assert (tmp_path / "ended").read_text() == "1"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_end_both(number, code, tmp_path):
    process = subprocess.Popen(
        command('print("ready", flush=True)\ntime.sleep(60)'),
        env=environ(), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(10) == code
    assert not child.is_running() or child.status() == "zombie"
    process.stdout.close()


@pytest.mark.wide
def test_a_command_that_ignores_ctrl_c_is_killed(tmp_path):
    body = 'signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint("ready", flush=True)\ntime.sleep(60)'
    with Terminal(command(body), environ(), str(tmp_path)) as terminal:
        terminal.wait_for("ready")
        pressed = time.monotonic()
        terminal.send(CTRL_C)
        terminal.wait_for_end()
        assert 4 < time.monotonic() - pressed < 15


def test_exit_codes_are_passed_on(tmp_path):
    done = subprocess.run(command("sys.exit(7)"), env=environ(), cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == 7


def test_a_second_ctrl_c_kills(tmp_path):
    body = 'signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint("ready", flush=True)\ntime.sleep(60)'
    with Terminal(command(body), environ(), str(tmp_path)) as terminal:
        terminal.wait_for("ready")
        pressed = time.monotonic()
        for _ in range(2):
            terminal.send(CTRL_C)
            time.sleep(0.5)
        terminal.wait_for_end()
        assert time.monotonic() - pressed < 4
