"""``accel test``: flags, results, and what it says of a failed check."""

import json
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from accel_cli.app import main
from testkit.terminals import CTRL_C, Terminal


def run(*words, cwd):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", "test", *words],
        env=environ, cwd=cwd, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--config_file nope.yaml", "configuration file nope.yaml does not exist"),
        ("--num_proceses 2", "flag --num_proceses does not exist; did you mean --num_processes?"),
    ],
)
def test_a_mistake_is_an_error_of_this_command(flags, message, capsys):
    assert main(["test", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"accel test: error: {message}")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--cpu", marks=pytest.mark.full),
        "--cpu --num_processes 2 --gradient_accumulation_steps 2",
        pytest.param(
            "--cpu --num_processes 2 --use_fsdp --fsdp_version 2 --mixed_precision fp16",
            marks=pytest.mark.full,
        ),
        pytest.param("--cpu --num_processes 4 --mixed_precision bf16", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_worlds_that_are_right_pass(flags, tmp_path):
    done = run(*flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:-1]] == ["ok"] * 5
    assert lines[-1].startswith("Everything that was checked is right")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_results_as_json(tmp_path):
    done = run("--json", "--cpu", "--num_processes", "2", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert [check["name"] for check in report["checks"]][:2] == ["processes and devices", "collectives"]
    assert report["checks"][0]["found"].startswith("2 x cpu, MULTI_CPU")


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX systems")
@pytest.mark.parametrize("processes", ["1", pytest.param("3", marks=pytest.mark.full)])
def test_ctrl_c_ends_the_world_before_the_command(processes, tmp_path):
    marker = uuid.uuid4().hex
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": str(tmp_path), "ACCEL_TEST_MARKER": marker,
    }  # fmt: skip
    words = [sys.executable, "-m", "accel_cli", "test", "--cpu", "--num_processes", processes]
    with Terminal(words, environ, str(tmp_path)) as terminal:
        terminal.wait_for("processes and devices", seconds=60)
        terminal.send(CTRL_C)
        terminal.wait_for_end()
        assert marked(marker) == []
        assert terminal.code() == 128 + signal.SIGINT
        shown = terminal.shown()
    assert "Traceback" not in shown
    if processes != "1":
        assert shown.splitlines()[-1].startswith("accel: ended by Ctrl-C")


def marked(marker):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ACCEL_TEST_MARKER") == marker and process.status() != "zombie":
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


BROKEN = """
import accel_train.precision.base as module
def backward(self, loss, has_pending_grads, kwargs):
    (2 * loss).backward(**kwargs)
module.Precision.backward = backward
"""


@pytest.mark.wide
def test_training_that_is_wrong_is_told_with_rank_and_values(tmp_path):
    # A module that Python imports at its start breaks what is tested, as a faulty installation would.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, importlib.util, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'accel_cli.sanity.world':\n"
        "            sys.meta_path.remove(self)\n"
        f"            exec({BROKEN!r})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "test", "--cpu", "--num_processes", "2"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  training" in done.stdout
    assert "rank 0: " in done.stdout
    assert "one process has" in done.stdout
    assert "saving" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "takes flags only, and 'train.py' is not a flag"),
        (["--num_proceses", "2"], "did you mean --num_processes"),
    ],
)
def test_wrong_command_lines(words, message, capsys):
    assert main(["test", *words]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main(["test", "--help"]) == 0
    assert "saving and resuming are exact" in " ".join(capsys.readouterr().out.split())
