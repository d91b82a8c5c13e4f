"""``accel runs``, over runs that ``accel launch`` has really started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from accel_cli.app import main

FAILS = """
import os, time
print("rank", os.environ["RANK"], "begins", flush=True)
time.sleep(0.5)  # standard output and standard error are read side by side
if os.environ["RANK"] == "1":
    raise ValueError("no data")
time.sleep(600)
"""
WAITS = "import time\nprint('waiting', flush=True)\ntime.sleep(600)\n"


def start(folder, name, text):
    script = folder / f"{name}.py"
    script.write_text(text)
    words = ["launch", "--cpu", "--num_processes", "2", "--log_dir", str(folder / "runs" / name), str(script)]
    return subprocess.Popen(
        [sys.executable, "-m", "accel_cli", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for(path, text):
    until = time.monotonic() + 60
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < until, path
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run that failed, one whose launcher was killed, and one that still runs."""
    folder = tmp_path_factory.mktemp("work")
    assert start(folder, "fails", FAILS).wait() == 1
    killed = start(folder, "killed", WAITS)
    wait_for(folder / "runs" / "killed" / "rank_0.log", "waiting")
    killed.kill()
    killed.wait()
    running = start(folder, "running", WAITS)
    wait_for(folder / "runs" / "running" / "rank_0.log", "waiting")
    yield folder / "runs"
    running.send_signal(signal.SIGTERM)
    running.wait()


@pytest.fixture(scope="module")
def facts(folder):
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "runs", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {run["name"]: run for run in json.loads(done.stdout)}


def test_the_state_of_each_run(facts):
    assert {name: (run["state"], run["rank"]) for name, run in facts.items()} == {
        "fails": ("failed", 1),
        "killed": ("killed", None),
        "running": ("running", None),
    }
    assert facts["fails"]["code"] == 1
    assert facts["fails"]["ranks"] == 2
    assert facts["fails"]["last_lines"][-1] == "ValueError: no data"
    assert facts["running"]["ended"] is None


def test_the_list_shows_the_end_of_the_failing_rank(folder, capsys):
    assert main(["runs", str(folder), "--lines", "1"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "began", "took", "ranks", "checkpoint"]
    assert [line.split()[0] for line in lines[:3]] == ["fails", "killed", "running"]
    assert lines[0].split()[1:4] == ["failed,", "rank", "1"]
    assert lines[4:] == [
        f"fails, rank 1 (exit code 1), from {folder}/fails/rank_1.log:",
        "  ValueError: no data",
    ]


def test_one_run_with_its_logs(folder, capsys):
    assert main(["runs", str(folder), "fails", "--lines", "20"]) == 0
    out = capsys.readouterr().out
    assert "failed, rank 1: exit code 1" in out
    assert out.index("rank_0.log:\n  rank 0 begins") < out.index("rank_1.log:\n  rank 1 begins")
    assert out.endswith("ValueError: no data\n")


def test_the_newest_complete_checkpoint_is_found(folder, capsys):
    from accel_ckpt import Checkpointer

    Checkpointer(folder / "fails").save(3, {"progress": {"epoch": 1}})
    (folder / "fails" / "step_4").mkdir()
    assert main(["runs", str(folder), "fails", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["checkpoint"] == os.fspath(folder / "fails" / "step_3")


def test_what_is_not_there(folder, tmp_path, capsys):
    assert main(["runs", str(folder), "fail"]) == 2
    assert "there is no run fail in" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "gone")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().err
