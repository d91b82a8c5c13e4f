"""``accel to-fsdp2`` against the real ``accelerate to-fsdp2``, on files that Accelerate wrote and on generated ones."""

from __future__ import annotations

import copy
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_cli.app import main
from accel_state.config.files import load

pytest.importorskip("accelerate", reason="needs the real Accelerate: hatch run engines:accelerate")

# As `accelerate config` writes it; TRL ships one for each version of FSDP.
SHIPPED = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
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
"""
VALUES = {
    "fsdp_version": [1],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    "fsdp_forward_prefetch": [True, False],
    "fsdp_cpu_ram_efficient_loading": [True, False],
    "fsdp_offload_params": [True, False],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "fsdp_sync_module_states": [True, False],
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "A,B"],
    "fsdp_min_num_params": [1000, 100000000],
    "fsdp_use_orig_params": [True, False],
    "fsdp_activation_checkpointing": [True, False],
    "fsdp_ignored_modules": [".*head"],
}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


def ours(source: Path, target: Path) -> dict:
    assert main(["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]) == 0
    return yaml.safe_load(target.read_text())


def theirs(source: Path, target: Path) -> dict:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "to-fsdp2"]
    words = [*command, "--config_file", str(source), "--output_file", str(target)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return yaml.safe_load(target.read_text())


@pytest.mark.parametrize("key", ["fsdp_reshard_after_forward", "fsdp_sharding_strategy"])
def test_a_shipped_file_becomes_what_the_real_command_makes_of_it(tmp_path, key):
    source = tmp_path / "fsdp1.yaml"
    source.write_text(SHIPPED.replace("fsdp_reshard_after_forward", key))
    assert ours(source, tmp_path / "ours.yaml") == theirs(source, tmp_path / "theirs.yaml")


def test_200_generated_files(tmp_path):
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    draw = random.Random(0)
    keys = itertools.cycle(["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
    for index in range(200):
        options = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.6}
        options[next(keys)] = draw.choice(STRATEGIES)
        options = dict(draw.sample(list(options.items()), len(options)))  # in any order
        data = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": options}
        source = tmp_path / f"{index}.yaml"
        source.write_text(yaml.safe_dump(data, sort_keys=False))
        made = ours(source, tmp_path / f"{index}.new.yaml")
        assert made == convert_config_to_fsdp2(copy.deepcopy(data)), data
        assert load(tmp_path / f"{index}.new.yaml").fsdp.fsdp_version == 2


def test_accelerate_reads_what_ours_makes_where_its_own_result_is_refused(tmp_path, monkeypatch):
    """A deliberate difference: Accelerate copies LOCAL_STATE_DICT, which its own version 2 does not take."""
    source = tmp_path / "c.yaml"
    source.write_text("fsdp_config:\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n")
    made = [convert(source, tmp_path / convert.__name__)["fsdp_config"] for convert in (theirs, ours)]
    from accelerate import FullyShardedDataParallelPlugin

    def build(options):
        return FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=options["fsdp_state_dict_type"], auto_wrap_policy="no_wrap"
        )

    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        build(made[0])
    assert "SHARDED" in str(build(made[1]).state_dict_type)
