"""The launcher without what only POSIX systems and Linux have: sessions, fork, parent-death signals, SIGCHLD.

The absence is simulated in a launcher of its own, so the code that other systems run is run here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

WITHOUT = """
import os, runpy, select, signal, sys
from accel_state.launching.ranks import processes, signals, supervisor
from accel_state.launching.watching import output
output._CAN_POLL = False
processes.HAS_SESSIONS = supervisor.HAS_SESSIONS = False
processes.die_with_parent = lambda signum: None
signals._NAMES = ("SIGINT", "SIGTERM")
del os.fork
def refuse(*streams):
    raise OSError("only sockets can be selected")
select.select = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DRIVER = Path(__file__).with_name("launching_driver.py")


def start(folder, body, *flags):
    script = folder / "script.py"
    script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + body)
    return subprocess.Popen(
        [sys.executable, "-c", WITHOUT, str(DRIVER), "--cpu", "--num_processes", "2", *flags, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_output_and_success(tmp_path):
    out, err = (process := start(tmp_path, "print('rank', rank)")).communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]


def test_a_failure_ends_the_others(tmp_path):
    process = start(tmp_path, "if rank: raise ValueError('told')\ntime.sleep(60)")
    started = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 20
    assert process.returncode == 1
    assert err.rstrip().endswith("ValueError: told")


def test_restarts(tmp_path):
    body = "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) == 0)"
    process = start(tmp_path, body, "--max_restarts", "1")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


@pytest.mark.skipif(os.name != "posix", reason="sends SIGTERM to the launcher")
def test_sigterm_ends_the_ranks(tmp_path):
    process = start(tmp_path, "open(f'ready_{rank}', 'w').close()\ntime.sleep(60)")
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("ready_*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not [rank for rank in ranks if rank.is_running()]
