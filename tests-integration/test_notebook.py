"""``notebook_launcher`` in a real notebook: a kernel, cells, and a function that one of them defines."""

import os
import sys

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install nbformat")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel")

SETUP = """
import torch
import torch.distributed as dist
from torch import nn

from accel_state import PartialState, notebook_launcher

torch.manual_seed(0)
data = torch.randn(64, 1000)
print("before:", (data @ data.T).shape)  # starts torch's threads, as exploring data in a notebook does
"""
DEFINITION = """
def train(steps):
    state = PartialState()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(data[state.process_index :: state.num_processes]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [torch.empty_like(model.module.weight) for _ in range(state.num_processes)]
    dist.all_gather(weights, model.module.weight.detach())
    print(f"rank {state.process_index} of {state.num_processes}: equal {torch.equal(*weights)}")
"""


def execute(*cells, raises=False, **environ):
    """Run cells in a kernel. Notebooks show colours, so kernels set FORCE_COLOR; here texts are compared."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=raises)
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"} | environ)
    return notebook.cells


def text(cell, stream="stdout"):
    return "".join(output["text"] for output in cell.outputs if output.get("name") == stream)


def test_a_function_of_a_cell_trains_on_two_processes_and_again():
    run = "notebook_launcher(train, (3,), num_processes=2)"
    cells = execute(SETUP, DEFINITION, run, run, "print('RANK' in __import__('os').environ)")
    for cell in cells[2:4]:
        assert sorted(text(cell).splitlines()) == [
            f"[rank {rank}] rank {rank} of 2: equal True" for rank in (0, 1)
        ]
    assert text(cells[4]) == "False\n"


@pytest.mark.full
def test_a_failing_rank_shows_its_traceback_in_the_notebook():
    broken = (
        "def broken():\n    if PartialState().process_index == 1:\n        raise ValueError('bad cell')\n"
    )
    cells = execute(
        SETUP, broken, "notebook_launcher(broken, num_processes=2)", "print('alive')", raises=True
    )
    error = next(output for output in cells[2].outputs if output["output_type"] == "error")
    assert error["ename"] == "LaunchError"
    assert "rank 1 of 2 failed" in error["evalue"]
    assert error["evalue"].endswith("ValueError: bad cell")
    assert text(cells[3]) == "alive\n"


@pytest.mark.full
def test_a_notebook_that_has_an_accelerator_already_is_told():
    cells = execute(SETUP, "state = PartialState()", "notebook_launcher(print, num_processes=2)", raises=True)
    error = next(output for output in cells[2].outputs if output["output_type"] == "error")
    assert error["ename"] == "StateError"
    assert "restart the notebook's kernel" in error["evalue"]


ACCELERATOR = """
import torch
from accel_state import notebook_launcher
from accel_train import Accelerator

def train(label):
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(64, 300)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    print(label, accelerator.num_processes, accelerator.distributed_type.value, accelerator.mixed_precision)
"""


@pytest.mark.full
def test_one_process_then_two_then_one_in_the_same_notebook():
    cells = execute(
        ACCELERATOR,
        "notebook_launcher(train, ('a',), num_processes=1)",
        "notebook_launcher(train, ('b',), num_processes=2, mixed_precision='bf16')",
        "notebook_launcher(train, ('c',), num_processes=1)",
    )
    assert text(cells[1]) == "a 1 NO no\n"
    assert sorted(text(cells[2]).splitlines()) == [f"[rank {rank}] b 2 MULTI_CPU bf16" for rank in (0, 1)]
    assert text(cells[3]) == "c 1 NO no\n"


@pytest.mark.full
def test_a_state_of_a_later_cell_is_refused_also_after_one_process():
    cells = execute(
        ACCELERATOR,
        "notebook_launcher(train, ('a',), num_processes=1)",
        "from accel_state import PartialState\nPartialState.reset()\nstate = PartialState()",
        "notebook_launcher(train, ('b',), num_processes=2)",
        raises=True,
    )
    error = next(output for output in cells[3].outputs if output["output_type"] == "error")
    assert "an Accelerator or PartialState already exists in this process" in error["evalue"]


@pytest.mark.full
def test_a_function_of_a_cell_is_sent_to_new_processes():
    cells = execute(
        SETUP, DEFINITION, "notebook_launcher(train, (3,), num_processes=2, start_method='spawn')"
    )
    assert sorted(text(cells[2]).splitlines()) == [
        f"[rank {rank}] rank {rank} of 2: equal True" for rank in (0, 1)
    ]


@pytest.mark.wide
def test_an_interrupt_ends_the_ranks_and_the_notebook_goes_on():
    sleep = "import time\ndef sleep():\n    time.sleep(60)"
    interrupt = (
        "import os, signal, threading\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "notebook_launcher(sleep, num_processes=2)"
    )
    cells = execute(SETUP, sleep, interrupt, "print('alive')", raises=True)
    error = next(output for output in cells[2].outputs if output["output_type"] == "error")
    assert error["ename"] == "KeyboardInterrupt"
    assert text(cells[3]) == "alive\n"


@pytest.mark.full
def test_a_notebook_shows_each_rank_in_its_colour():
    cells = execute(SETUP, "notebook_launcher(lambda: print('x'), num_processes=2)", NO_COLOR="")
    assert sorted(text(cells[1]).splitlines()) == ["\x1b[35m[rank 1]\x1b[0m x", "\x1b[36m[rank 0]\x1b[0m x"]
