"""``accel jobs``, with programs in place of the engines' tools."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

JOBS = [sys.executable, "-m", "accel_cli", "jobs"]
LISTED = [{"job_id": 1, "job_name": "a\x1b[2J", "status": "FAILED", "failure_reason": "no\n\x1b[31mdisk"}]


@pytest.fixture
def sky(tmp_path):
    """Makes ``sky`` a shell script; returns the environment in which it is found."""

    def make(text):
        tool = tmp_path / "sky"
        tool.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{text}\n")
        tool.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)}

    return make


def ask(environ, *words):
    return subprocess.run(
        [*JOBS, *words, "--engine", "skypilot"], env=environ, capture_output=True, text=True, check=False
    )


def ended(pid, seconds=10.0):
    """Whether a process ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_jobs_are_a_table_that_cannot_move_the_cursor_and_json(sky):
    environ = sky(f"cat <<'END'\n{json.dumps(LISTED)}\nEND")
    lines = ask(environ, "ls").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["job", "name", "state", "machines", "why"],
        ["1", r"a\x1b[2J", "failed", "-", "no", r"\x1b[31mdisk"],
    ]
    assert json.loads(ask(environ, "ls", "--json").stdout) == [
        {"id": "1", "name": "a\x1b[2J", "state": "failed", "machines": None, "why": "no\n\x1b[31mdisk"}
    ]


def test_logs_cannot_move_the_cursor(sky):
    environ = sky(r"printf 'a\033[2J\n'")
    assert ask(environ, "logs", "1").stdout == "a\n"  # click leaves such codes out
    terminal, screen = pty.openpty()
    subprocess.run([*JOBS, "logs", "1", "--engine", "skypilot"], env=environ, stdout=screen, check=True)
    assert os.read(terminal, 100) == b"a\\x1b[2J\r\n"
    os.close(screen)
    os.close(terminal)


@pytest.mark.parametrize(("code", "end"), [(0, 0), (100, 0), (101, 0), (103, 0), (102, 1), (1, 1)])
def test_logs_of_a_job_that_has_failed_are_no_failure_of_the_command(sky, code, end):
    # The tool closes its output before it ends.
    done = ask(sky(f"echo line; exec >&- 2>&-; sleep 0.2; exit {code}"), "logs", "1")
    assert (done.stdout, done.returncode) == ("line\n", end)
    assert end == 0 or f"failed with exit code {code}" in done.stderr


@pytest.mark.parametrize("way", ["interrupted", "closed"])
def test_following_a_log_ends_with_the_reader(sky, tmp_path, way):
    environ = sky("trap 'exit 0' TERM; while :; do echo line; sleep 0.05; done")
    with subprocess.Popen(
        [*JOBS, "logs", "1", "--follow", "--engine", "skypilot"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as following:  # fmt: skip
        assert following.stdout.readline() == b"line\n"
        if way == "interrupted":
            following.send_signal(signal.SIGINT)
        else:
            following.stdout.close()
        code = following.wait(20)
        told = following.stderr.read().decode()
    assert code == (-signal.SIGINT if way == "interrupted" else 141)
    assert "Traceback" not in told
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls"], "no engine is named; pass --engine"),
        (["ls", "--engine", "sky"], "'sky'"),
        (["logs", "--engine", "skypilot"], "missing argument 'job'"),
        (["logs", "--engine", "skypilot", "--", "-x"], "'-x' is not a job of SkyPilot"),
        (
            ["cancel", "1", "--engine", "slurm", "--namespace", "x"],
            "--namespace is 'x', and Slurm has no such",
        ),
    ],
)
def test_what_is_wrong_is_named(sky, words, told):
    done = subprocess.run([*JOBS, *words], env=sky("exit 1"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert not done.stdout
