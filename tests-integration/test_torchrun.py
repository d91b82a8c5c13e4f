"""Scripts that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import json, sys
import torch
from accel_state import PartialState
state = PartialState()
total = torch.tensor([float(state.process_index + 1)])
torch.distributed.all_reduce(total)
seen = [total.item(), state.num_processes, str(state.distributed_type), state.topology.launcher]
json.dump(seen, open(f"{sys.argv[1]}/{state.process_index}.json", "w"))
state.wait_for_everyone()
state.destroy_process_group()
"""


@pytest.mark.wide
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_t14_torchrun_on_a_cpu_box_is_one_world(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*command, str(script), str(tmp_path)], env=environ, check=True, timeout=120)
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == [3.0, 2, "DistributedType.MULTI_CPU", "torchrun"]
