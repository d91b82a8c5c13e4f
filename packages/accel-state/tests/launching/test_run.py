"""Carrying out a plan: what one launch works out, and how often."""

from __future__ import annotations

import os
import socket

import pytest

from accel_state.config import codec
from accel_state.config.launch import LaunchConfig
from accel_state.launching import run
from accel_state.launching.target import Target


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions that a launch called to work out what to run, in order."""
    made = []

    def counted(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(run, "plan_world")
    counted(run, "plan")
    counted(codec, "encode")
    return made


def launched(folder, body, **options):
    script = folder / "script.py"
    script.write_text(body)
    config = LaunchConfig(use_cpu=True, num_processes=2, **options)
    return run.launch(config, Target(str(script)), dict(os.environ))


def test_a_launch_works_out_its_world_and_its_first_plan_once(tmp_path, calls):
    assert launched(tmp_path, "") == 0
    assert calls == ["plan_world", "plan", "encode"]


def test_a_dry_run_works_out_the_same_once(tmp_path, calls, capsys):
    assert launched(tmp_path, "", dry_run=True) == 0
    assert calls == ["plan_world", "plan", "encode"]
    assert "# rank 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(("cores", "quiet"), [(1, False), (2, False), (1, True)])
def test_processes_that_share_cores_are_told_once(tmp_path, monkeypatch, capfd, cores, quiet):
    monkeypatch.setattr(run, "physical_cores", lambda: cores)
    assert launched(tmp_path, "", quiet=quiet) == 0
    told = cores == 1 and not quiet
    assert capfd.readouterr().err == ("accel: 2 processes share 1 core\n" if told else "")


def test_each_restart_makes_one_more_plan_of_the_same_world(tmp_path, calls):
    body = "import os, sys; sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    assert launched(tmp_path, body, max_restarts=1) == 0
    assert calls == ["plan_world", "plan", "encode", "plan", "encode"]


def test_the_port_of_the_first_plan_is_held_until_the_ranks_start(tmp_path, monkeypatch):
    taken = []
    start = run.start_members

    def check(planned, *args, **options):
        port = int(planned.processes[0].env["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        taken.append(port)
        return start(planned, *args)

    monkeypatch.setattr(run, "start_members", check)
    assert launched(tmp_path, "") == 0
    assert len(taken) == 1
