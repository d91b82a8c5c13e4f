"""Ranks as processes of the operating system, and the guardian."""

import os
import signal
import subprocess
import sys
import time

import pytest

from accel_state.constants import RUN_FOLDER
from accel_state.launching.ranks.processes import (
    Guardian,
    end_group,
    end_strays,
    group_is_alive,
    start_command,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups of POSIX systems")
CHILD = (
    "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
)


def started(code=CHILD, **options):
    how = {"capture": True, "reads_input": False, "on_parent_death": signal.SIGKILL} | options
    return start_command(3, (sys.executable, "-c", code), os.environ, **how)


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_rank_leads_its_own_group_and_ends_with_its_children():
    process = started()
    (name, pipe), _ = process.pipes
    assert (process.rank, name, pipe.readline()) == (3, "stdout", b"up\n")
    assert os.getpgid(process.pid) == process.pid
    assert process.poll() is None
    process.kill()
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGKILL
    wait_until(lambda: not group_is_alive(process.pid))  # the child is killed too


def test_a_signal_reaches_the_rank_alone_and_an_interrupt_its_group():
    process = started()
    process.pipes[0][1].readline()
    process.send(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGTERM
    assert group_is_alive(process.pid)  # its child did not get the signal
    assert end_group(process.pid, signal.SIGKILL)
    wait_until(lambda: not group_is_alive(process.pid))
    interrupted = started()
    interrupted.pipes[0][1].readline()
    interrupted.send(signal.SIGINT)
    wait_until(lambda: interrupted.poll() is not None)
    wait_until(lambda: not group_is_alive(interrupted.pid))


def test_a_command_that_does_not_exist_raises():
    with pytest.raises(OSError, match="no-such-command"):
        start_command(
            0,
            ("no-such-command",),
            os.environ,
            capture=True,
            reads_input=False,
            on_parent_death=signal.SIGTERM,
        )


def test_the_guardian_kills_groups_that_it_still_watches():
    watched, forgotten = (
        subprocess.Popen(["sleep", "60"], start_new_session=True),
        subprocess.Popen(["sleep", "60"], start_new_session=True),
    )
    guardian = Guardian()
    guardian.watch(watched.pid)
    guardian.watch(forgotten.pid)
    guardian.forget(forgotten.pid)
    guardian.close()  # as when the launcher ends
    assert watched.wait(10) == -signal.SIGKILL
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()


def test_an_inactive_guardian_does_nothing():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    guardian = Guardian(active=False)
    guardian.watch(process.pid)
    guardian.close()
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="descriptors of processes, of Linux")
def test_what_has_inherited_the_folder_of_a_launch_ends_and_nothing_else(tmp_path):
    mine, others = str(tmp_path / "run-1"), str(tmp_path / "run-12")
    launched = (
        "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3).pid)"
    )
    parent = subprocess.run(  # it ends, and its child goes on in a session of its own
        [sys.executable, "-c", launched],
        env={**os.environ, RUN_FOLDER: mine},
        stdout=subprocess.PIPE,
        check=True,
    )
    stray = int(parent.stdout)
    spare = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_FOLDER: mine})
    foreign = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_FOLDER: others})
    try:
        assert end_strays(mine, signal.SIGKILL, launcher=os.getpid())
        wait_until(lambda: not group_is_alive(stray))
        assert not end_strays(mine, 0, launcher=os.getpid())
        assert spare.poll() is None
        assert end_strays(mine, signal.SIGKILL)
        assert spare.wait(10) == -signal.SIGKILL
        assert foreign.poll() is None
    finally:
        spare.kill()
        foreign.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="descriptors of processes, of Linux")
def test_a_guardian_ends_what_has_inherited_its_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    guardian = Guardian()
    guardian.remove(str(folder))
    stray = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, RUN_FOLDER: str(folder)}, start_new_session=True
    )
    try:
        guardian.close()
        assert stray.wait(10) == -signal.SIGKILL
        assert not folder.exists()
    finally:
        stray.kill()
