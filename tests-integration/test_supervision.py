"""What `accel launch` says of a world of torch processes that hangs or is slow."""

import os
import re
import subprocess
import sys

import pytest

from accel_state.launching.ranks.processes import group_is_alive
from accel_state.launching.watching.monitor import CAN_WATCH

pytestmark = pytest.mark.skipif(not CAN_WATCH, reason="real-time signals and /proc of Linux")

START = """
import datetime, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_train import Accelerator, InitProcessGroupKwargs
seconds = datetime.timedelta(seconds=int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 600)
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=seconds)])
rank = accelerator.process_index
"""

LOOP = (
    START
    + """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x,) in enumerate(loader):
    before_forward(step)
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_model(model, sys.argv[-1])
"""
)


def accel(tmp_path, *flags, body, args=()):
    script = tmp_path / "train.py"
    script.write_text(body)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", *flags]
    return subprocess.run(
        [*command, str(script), *args], env=environ, capture_output=True, text=True, timeout=180
    )


@pytest.mark.wide
def test_a_rank_that_sleeps_before_an_all_reduce_is_named(tmp_path):
    body = START + "if rank == 1:\n    time.sleep(1000)\ntorch.distributed.all_reduce(torch.ones(5))\n"
    done = accel(tmp_path, "--step_timeout", "5", body=body)
    assert done.returncode == 124, done.stderr
    waits = re.search(r"rank 0 waits in (.*) at .*train.py:(\d+)", done.stderr)
    assert body.splitlines()[int(waits[2]) - 1].startswith("torch.distributed.all_reduce")
    assert "all_reduce (#1 of gloo; Float 5)" in waits[1]
    where = re.search(r"rank 1 is in no collective, at .*train.py:(\d+)", done.stderr)
    assert "time.sleep(1000)" in body.splitlines()[int(where[1]) - 1]
    assert "rank 1 differs from the others" in done.stderr


@pytest.mark.full
def test_a_collective_of_this_project_is_named_with_its_line(tmp_path):
    body = START + "if rank == 0:\n    time.sleep(1000)\naccelerator.gather(torch.ones(5))\n"
    done = accel(tmp_path, "--step_timeout", "5", body=body)
    assert done.returncode == 124, done.stderr
    assert re.search(rf"rank 1 waits in gather \(#\d+\) at .*train.py:{len(body.splitlines())}", done.stderr)
    assert "rank 0 differs from the others" in done.stderr


@pytest.mark.full
def test_an_endless_loop_in_training_is_found(tmp_path):
    stuck = "def before_forward(step):\n    while rank == 1 and step == 5:\n        pass\n"
    done = accel(tmp_path, "--step_timeout", "8", body=stuck + LOOP)
    assert done.returncode == 124, done.stderr
    assert "in before_forward" in done.stderr.split("rank 1 is in no collective, at ")[1]
    assert "rank 0 waits in" in done.stderr
    assert re.search(r"after 5 steps, in phase forward for \d+ s", done.stderr)
    assert re.search(r"after 5 steps, in phase backward for \d+ s", done.stderr)
    assert "rank 1 differs from the others" in done.stderr


@pytest.mark.full
def test_the_time_out_of_a_collective_shows_where_the_others_are(tmp_path):
    body = START + "if rank == 1:\n    time.sleep(1000)\ntorch.distributed.all_reduce(torch.ones(5))\n"
    done = accel(tmp_path, body=body, args=("2",))
    assert done.returncode == 1
    assert "a collective has timed out" in done.stderr
    assert "rank 1 is in no collective" in done.stderr
    assert "time.sleep(1000)" in done.stderr


@pytest.mark.full
def test_the_slow_rank_is_named(tmp_path):
    slow = "def before_forward(step):\n    time.sleep(0.03 if rank == 1 else 0)\n"
    done = accel(tmp_path, "--straggler_report", body=slow + LOOP, args=(str(tmp_path / "saved"),))
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line.split() for line in done.stderr.splitlines() if line.strip()}
    names = ["steps", *table["rank"][2:5]]
    assert names == ["steps", "data", "forward", "backward"]
    assert [table[rank][1] for rank in "01"] == ["16", "16"]
    assert float(table["1"][3]) > 25 > float(table["0"][3])
    assert float(table["0"][4]) > float(table["1"][4]), "the fast rank waits in backward"
    assert re.search(r"slowest: rank 1, [\d.]+ times the others' time .*mostly forward", done.stderr)


@pytest.mark.full
def test_a_run_that_is_not_watched_writes_no_heartbeats(tmp_path):
    body = START + "assert accelerator._accumulator.observers == []\nprint('off')\n"
    done = accel(tmp_path, body=body)
    assert (done.returncode, done.stdout.count("off")) == (0, 2), done.stderr


SESSIONS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
group = subprocess.Popen(["sleep", "600"], process_group=0)
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    print(child.pid, group.pid, file=file)
if os.environ["RANK"] == "1":
    while len(os.listdir(sys.argv[1])) < 2:
        time.sleep(0.01)
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_children_in_sessions_of_their_own_end_with_the_launcher(tmp_path, code):
    (tmp_path / "children").mkdir()
    done = accel(tmp_path, body=SESSIONS, args=[str(tmp_path / "children"), str(code)])
    assert done.returncode == code
    pids = [int(pid) for path in (tmp_path / "children").iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and group_is_alive(pid)]
