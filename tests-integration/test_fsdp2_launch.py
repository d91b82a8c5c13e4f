"""FSDP2 as users select it: files of Accelerate, flags, variables alone, and a plugin in the script."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# As `accelerate config` writes them and TRL ships them, for versions 1 and 2.
COMMON = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_state_dict_type: FULL_STATE_DICT
"""
FILES = {
    "fsdp1": COMMON
    + """  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
""",
    "fsdp2": COMMON
    + """  fsdp_reshard_after_forward: true
  fsdp_version: 2
""",
}
SCRIPT = """
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel_train import Accelerator, FullyShardedDataParallelPlugin

in_code = sys.argv[1:] == ["plugin"]
plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False) if in_code else None
accelerator = Accelerator(fsdp_plugin=plugin)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2,
    num_hidden_layers=2,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.arange(20).view(2, 10)
accelerator.backward(model(input_ids=ids, labels=ids).loss)
optimizer.step()
units = sum(type(module).__name__.startswith("FSDP") for module in model.modules())
divided = all(hasattr(parameter, "to_local") for parameter in model.parameters())
plugin = accelerator.state.fsdp_plugin
accelerator.print(
    "told", accelerator.distributed_type.name, accelerator.num_processes, accelerator.mixed_precision, units, divided,
    plugin.reshard_after_forward,
)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("fsdp1", "told FSDP 2 bf16 3 True True", marks=pytest.mark.full),
        ("fsdp2", "told FSDP 2 bf16 3 True True"),
        pytest.param("flags", "told FSDP 2 no 3 True False", marks=pytest.mark.full),
        pytest.param("plugin", "told FSDP 2 no 3 True False", marks=pytest.mark.full),
        pytest.param("torchrun", "told FSDP 2 no 3 True False", marks=pytest.mark.full),
    ],
)
def test_user_paths(tmp_path, how, expected):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2"]
    environment = dict(os.environ)
    arguments: list[str] = []
    if how in FILES:
        (tmp_path / "file.yaml").write_text(FILES[how])
        command = [*launch, "--config_file", "file.yaml"]
    elif how == "flags":
        command = [*launch, "--use_fsdp", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "false"]
    elif how == "plugin":
        command, arguments = launch, ["plugin"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        environment |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"}
        environment |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    done = subprocess.run(
        [*command, str(script), *arguments],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.full
def test_one_process_cannot_be_sharded(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), "plugin"],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "fsdp2" in done.stderr
    assert "accel launch" in done.stderr
