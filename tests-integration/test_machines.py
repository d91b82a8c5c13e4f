"""Launchers of several machines, which are two on this one: reports of hangs, and exit codes."""

import os
import subprocess
import sys

import pytest

from accel_state.launching.watching.monitor import CAN_WATCH
from testkit import worlds

START = """
import os, sys, time
import torch
from accel_train import Accelerator
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
"""


def launch(folder, *flags, body, machines=2):
    """The exit code and the standard error of each launcher; each has two ranks."""
    script = folder / "train.py"
    script.write_text(body)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["--cpu", "--num_processes", str(2 * machines), "--num_machines", str(machines)]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(worlds.free_port()), *flags]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "accel_cli", "launch", *words, "--machine_rank", str(rank), str(script)],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(machines)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=150)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], told


@pytest.mark.skipif(not CAN_WATCH, reason="real-time signals and /proc of Linux")
def test_the_rank_that_hangs_is_named_once_and_all_launchers_end(tmp_path):
    body = START + "if rank == 3:\n    time.sleep(1000)\ntorch.distributed.all_reduce(torch.ones(5))\n"
    codes, (report, other) = launch(tmp_path, "--step_timeout", "8", body=body)
    assert codes == [124, 124], (report, other)
    lines = report.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("machine ")))
    assert lines[head + 1].split()[1:5] == ["3", "is", "in", "no"], report
    assert "ranks 0, 1 and 2 wait in all_reduce (#1 of gloo; Float 5) at" in report
    assert "time.sleep(1000)" in report
    assert "differs" not in other, "the first machine reports for all"
    assert "with exit code 124: no rank of any machine has made progress for 8 s" in other


FAILS = (
    START
    + """
for step in range(2000):
    accelerator.gather(torch.ones(2))
    if step == 20 and rank in {at}:
        {fault}
    time.sleep(0.01)
"""
)


@pytest.mark.parametrize(
    ("at", "fault", "expected"),
    [
        ((2,), "raise ValueError('here')", [76, 1]),
        pytest.param((0,), "os.kill(os.getpid(), 9)", [137, 76], marks=pytest.mark.wide),
        pytest.param((0,), "sys.exit(9)", [9, 76], marks=pytest.mark.full),
        pytest.param((1, 3), "raise ValueError('here')", [1, 1], marks=pytest.mark.wide),
    ],
)
def test_the_machine_that_fails_first_has_its_code_and_the_others_76(tmp_path, at, fault, expected):
    codes, told = launch(tmp_path, body=FAILS.format(at=at, fault=fault))
    assert codes == expected, told
    for code, text in zip(codes, told, strict=True):
        others = [one for one in expected if one != 76]
        wanted = f"rank {at[0]} on " if code == 76 else f"failed first, with exit code {code}"
        assert wanted in text
        assert code != 76 or f"failed first, with exit code {others[0]}" in text


def test_a_machine_that_is_interrupted_tells_the_others(tmp_path):
    fault = "import psutil; psutil.Process().parent().parent().send_signal(2)"
    codes, (own, other) = launch(tmp_path, body=FAILS.format(at=(0,), fault=fault))
    assert codes == [-2, 76], (own, other)
    assert "did not exit in time" not in own
    assert "rank 0 on " in other
    assert "failed first, with exit code 130" in other
