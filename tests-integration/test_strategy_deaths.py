"""A rank that dies while the others wait for it inside an engine's collective: all end soon, and the message names it.

`hatch run engines:deepspeed` runs the cases of DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from accel_train import (
    Accelerator,
    DeepSpeedPlugin,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchTensorParallelPlugin,
)

strategy, place, way, victim, folder = sys.argv[1:]
if strategy == "fsdp2":
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
elif strategy == "tp":
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
elif strategy == "ddp":
    accelerator = Accelerator(cpu=True)
elif strategy.startswith("pp"):
    schedule = {"loss_function": nn.functional.mse_loss} if strategy == "pp fused" else {"schedule": "gpipe"}
    stages = PipelineParallelConfig(modules=["blocks"], **schedule)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=stages))
else:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
rank = accelerator.process_index
Path(folder, f"pid_{rank}").write_text(str(os.getpid()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


model = Net()
blocks = model.blocks
if strategy == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(
            block, accelerator.torch_device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
step = 0


def die(*_):
    if step < 2 or rank != int(victim) or way == "leave":
        return
    Path(folder, "died").write_text(repr(time.time()))
    if way == "raise":
        raise ValueError("this rank gives up")
    os.kill(os.getpid(), signal.SIGKILL)


model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
if place == "forward":
    blocks[2].register_forward_hook(die)
else:
    blocks[3].register_full_backward_hook(die)
for step in range(4):
    if way == "leave" and step == 2 and rank == int(victim):
        Path(folder, "died").write_text(repr(time.time()))
        break
    x = torch.randn(4, 16)
    accelerator.backward(model(x, target=x).loss if strategy == "pp fused" else model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
print("trained to the end")
"""
full = pytest.mark.full
no_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="hatch run engines:deepspeed installs it"
)
CASES = [
    pytest.param("fsdp2", "forward", "kill", 1, marks=full),
    ("fsdp2", "backward", "raise", 1),
    pytest.param("fsdp2", "backward", "kill", 0, marks=full),  # the host of the store
    pytest.param("fsdp2", "forward", "raise", 0, marks=full),
    pytest.param("fsdp2", "backward", "kill", 1, marks=full),
    pytest.param("tp", "forward", "kill", 1, marks=full),
    pytest.param("tp", "backward", "raise", 1, marks=full),
    pytest.param("tp", "backward", "kill", 0, marks=full),
    pytest.param("tp", "forward", "raise", 0, marks=full),
    pytest.param("pp", "forward", "raise", 0, marks=full),
    pytest.param("pp", "backward", "raise", 1, marks=full),
    pytest.param("pp fused", "forward", "raise", 0, marks=full),
    ("pp fused", "backward", "raise", 1),
    pytest.param("ddp", "loop", "leave", 1, marks=full),
    ("pp", "loop", "leave", 1),
    pytest.param("pp fused", "loop", "leave", 1, marks=full),
    pytest.param("deepspeed", "forward", "kill", 1, marks=no_deepspeed),
    pytest.param("deepspeed", "backward", "kill", 0, marks=no_deepspeed),
    pytest.param("deepspeed", "forward", "raise", 0, marks=no_deepspeed),
    pytest.param("deepspeed", "backward", "raise", 1, marks=no_deepspeed),
]
BOUND = 30  # seconds from a rank's death to the launcher's end; it takes one or two on an idle machine


@pytest.mark.wide(only=["fsdp2-backward-raise-1", "pp-loop-leave-1"])
@pytest.mark.parametrize(("strategy", "place", "way", "victim"), CASES)
def test_a_rank_that_dies_inside_a_step_ends_all(tmp_path, strategy, place, way, victim):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--cpu", "--num_processes", "2", str(script), strategy, place, way, str(victim), str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *words],
        env=environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (tmp_path / "died").exists(), done.stderr
    lasted = time.time() - float((tmp_path / "died").read_text())
    assert lasted < BOUND
    assert "trained to the end" not in done.stdout
    if way == "kill":
        assert done.returncode == 128 + 9, done.stderr
        assert f"rank {victim} failed first (ended by SIGKILL" in done.stderr, done.stderr
    elif way == "leave":
        assert done.returncode == 1, done.stderr
        assert "wait_for_everyone" in done.stderr, done.stderr
        assert "cannot complete" in done.stderr, done.stderr
    else:
        assert done.returncode == 1, done.stderr
        assert f"rank {victim} failed first (exit code 1)" in done.stderr, done.stderr
        assert done.stderr.rstrip().endswith("ValueError: this rank gives up")
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid_{rank}").read_text()), 0)
