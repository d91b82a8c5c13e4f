"""The record of a run: written as a whole, and true of a launcher that was killed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from accel_state.errors import LaunchError
from accel_state.launching.ranks.supervisor import Outcome
from accel_state.launching.run_record import read_record, recorded

COMMAND = ("python", "train.py", "--hf_token", "abc", "DB_PASSWORD=def")
WORLD = {"ranks": 2, "world_size": 4, "machine_rank": 1, "machines": 2}


def test_a_run_is_recorded_while_it_runs_and_when_it_has_ended(tmp_path):
    path = tmp_path / "logs" / "run_1.json"
    with recorded(str(tmp_path / "logs"), COMMAND, **WORLD) as recorder:
        running = read_record(path)
    assert running.state == "running"
    assert (running.ranks, running.world_size, running.machine_rank, running.machines) == (2, 4, 1, 2)
    assert running.ended is None
    recorder.end(Outcome(3, failed=2, label="rank 2", how="exit code 3"))
    ended = read_record(path)
    assert (ended.state, ended.code, ended.rank, ended.how) == ("failed", 3, 2, "exit code 3")
    assert ended.ended >= ended.started == running.started
    assert [each.name for each in path.parent.iterdir()] == ["run_1.json"], "no temporary file is left"


def test_secrets_are_not_recorded(tmp_path):
    with recorded(str(tmp_path), COMMAND, ranks=1, world_size=1):
        text = (tmp_path / "run_0.json").read_text()
    assert "abc" not in text
    assert "def" not in text
    assert "train.py" in text


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(0), "finished"),
        (Outcome(75, failed=0, how="preempted, exit code 75"), "preempted"),
        (Outcome(143, stopped_by=15), "stopped"),
        (Outcome(137, failed=1, how="ended by SIGKILL", by_signal=True), "killed"),
        (Outcome(124, how="no progress", stalled=True), "failed"),
    ],
)
def test_states(tmp_path, outcome, state):
    with recorded(str(tmp_path), COMMAND, ranks=1, world_size=1) as recorder:
        pass
    recorder.end(outcome)
    assert read_record(tmp_path / "run_0.json").state == state


def test_a_launcher_that_was_killed_leaves_its_first_record(tmp_path):
    program = (
        "import os, signal\nfrom accel_state.launching.run_record import recorded\n"
        f"with recorded({str(tmp_path)!r}, ['x'], ranks=1, world_size=1): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    path = tmp_path / "run_0.json"
    assert json.loads(path.read_text())["state"] == "running"
    assert (read_record(path).state, read_record(path).how) == ("killed", "the launcher was killed")


def test_an_error_of_the_launcher_is_recorded_and_raised(tmp_path):
    with (
        pytest.raises(LaunchError, match="no such program"),
        recorded(str(tmp_path), COMMAND, ranks=1, world_size=1),
    ):
        raise LaunchError("no such program\nmore")
    record = read_record(tmp_path / "run_0.json")
    assert (record.state, record.how, record.code) == ("failed", "no such program", None)


def test_nothing_is_recorded_without_a_folder():
    with recorded(None, COMMAND, ranks=1, world_size=1) as recorder:
        assert recorder is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").touch()
    with (
        pytest.raises(LaunchError, match=r"run_0.json cannot be written .*; pass another --log_dir"),
        recorded(str(tmp_path / "logs"), COMMAND, ranks=1, world_size=1),
    ):
        raise AssertionError("the block runs")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "running"}', '{"command": 3}'])
def test_other_files_are_no_records(tmp_path, text):
    (tmp_path / "run_0.json").write_text(text)
    assert read_record(tmp_path / "run_0.json") is None
