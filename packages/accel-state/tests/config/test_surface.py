"""The schema has exactly the names that are known: those of Accelerate, and a frozen list of our own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from accel_state.config import (
    PUBLISHED,
    Carrier,
    SageMakerConfig,
    complete_root,
    installed_strategies,
    launcher_only_fields,
    parse_flags,
    schema_of,
    variables,
)
from accel_state.config.schema import plain_flag

SURFACE = json.loads((Path(__file__).parents[1] / "data" / "accelerate_surface.json").read_text())
OTHERS = tomllib.loads((Path(__file__).parents[4] / "tools" / "data" / "other_variables.toml").read_text())
COMMAND_FLAGS = {"help", "-h", "config_file"}  # belong to the command, not to the run
OUR_FLAGS = {
    "checkpoint_timeout", "command", "command_file", "commands", "distributed_type", "dry_run",
    "fp8_use_mxfp8_block_scaling", "fsdp_backward_prefetch_policy", "fsdp_ignored_modules",
    "cluster", "connect_timeout", "grace_period", "master_addr", "master_port", "min_machines", "nnodes", "node_rank",
    "nproc_per_node", "numa_binding", "parallelism_config_cp_load_balance", "parallelism_config_ep_size",
    "parallelism_config_pp_num_micro_batches",
    "parallelism_config_pp_schedule", "parallelism_config_pp_size", "parallelism_config_pp_stages_per_rank",
    "processes_per", "rdzv_id", "resume", "shutdown_timeout", "signals_to_handle",
    "spares", "start_timeout", "step_timeout", "straggler_report", "submit",
    "submit_engine", "submit_memory", "submit_retries", "submit_image", "submit_workdir",
    "submit_env", "submit_secrets", "submit_volumes", "submit_shared_memory", "submit_kind",
    "submit_namespace", "submit_queue", "submit_node_selector", "submit_tolerations", "submit_service_account",
    "submit_address",
    "submit_account", "submit_args", "submit_cpus_per_task", "submit_gpus_per_machine", "submit_job_name",
    "submit_output", "submit_partition", "submit_setup", "submit_signal_time", "submit_time", "tpu_env", "tpu_name",
    "tpu_use_cluster", "tpu_vm", "tpu_zone", "use_cpu", "virtual_local_rank",
}  # fmt: skip
OUR_KEYS = {
    "LOCAL_MACHINE": {
        "use_parallelism_config", "num_cpu_threads_per_process", "rdzv_conf", "tee", "log_dir",
        "role", "max_restarts", "monitor_interval", "grace_period", "gradient_accumulation_steps",
        "start_timeout", "step_timeout", "checkpoint_timeout", "straggler_report",
        "cluster", "connect_timeout", "min_machines", "numa_binding", "rdzv_id", "signals_to_handle", "spares",
        "submit_config", "virtual_local_rank",
    },
    "AMAZON_SAGEMAKER": set(),
    "fp8_config": {"use_mxfp8_block_scaling"},
    "parallelism_config": {
        "parallelism_config_cp_load_balance", "parallelism_config_ep_size", "parallelism_config_pp_num_micro_batches",
        "parallelism_config_pp_schedule",
        "parallelism_config_pp_size", "parallelism_config_pp_stages_per_rank",
    },
}  # fmt: skip
OUR_VARIABLES = {
    "ACCEL_CLUSTER",
    "ACCELERATE_COLLECTIVE_CHECKS", "ACCELERATE_COLLECTIVE_TIMEOUT_REPORT", "ACCELERATE_DISTRIBUTED_TYPE",
    "ACCELERATE_PROOF", "ACCELERATE_REHEARSAL", "ACCELERATE_RESUME", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "PARALLELISM_CONFIG_CP_LOAD_BALANCE", "PARALLELISM_CONFIG_EP_SIZE", "PARALLELISM_CONFIG_PP_NUM_MICRO_BATCHES",
    "PARALLELISM_CONFIG_PP_SCHEDULE",
    "PARALLELISM_CONFIG_PP_SIZE", "PARALLELISM_CONFIG_PP_STAGES_PER_RANK",
}  # fmt: skip
OUTSIDE = {each.name for each in installed_strategies()} - {"megatron"}
if OUTSIDE:
    pytest.skip(
        f"{', '.join(OUTSIDE)} is installed, whose options are in no frozen list", allow_module_level=True
    )
LOCAL, SAGEMAKER = schema_of(complete_root()), schema_of(SageMakerConfig)


def their_flags():
    return {plain_flag(flag) for spellings in SURFACE["flags"] for flag in spellings} - COMMAND_FLAGS


def test_the_frozen_table_has_the_documented_sizes():
    keys = SURFACE["keys"]
    assert len(SURFACE["flags"]) == 123 + 1  # one flag is newer than the count
    assert len(keys["LOCAL_MACHINE"]) == 31
    assert len(keys["AMAZON_SAGEMAKER"]) == 21
    sizes = {
        "dynamo": 5,
        "deepspeed": 15,
        "fsdp": 16,
        "megatron_lm": 27,
        "parallelism": 11,
        "fp8": 11,
        "mpirun": 1,
    }
    nested = {
        name: len(keys["parallelism_config" if name == "parallelism" else f"{name}_config"]) for name in sizes
    }
    assert nested == sizes
    assert {group: len(names) for group, names in SURFACE["variables"].items()} == {
        "ACCELERATE": 51, "FSDP": 15, "PARALLELISM_CONFIG": 11, "MEGATRON_LM": 27, "others": 62,
    }  # fmt: skip


def test_every_flag_of_accelerate_launch_exists():
    known = {*LOCAL.by_flag, *LOCAL.switches, "no_tpu_cluster", "aws_access_key_id", "aws_secret_access_key"}
    assert their_flags() <= known
    # The three that are no names of options of a local run:
    assert parse_flags(["--no_tpu_cluster"]).values == {"tpu.tpu_use_cluster": False}
    assert {"aws_access_key_id", "aws_secret_access_key"} <= set(SAGEMAKER.by_flag)


def test_every_other_flag_is_in_the_frozen_list():
    assert {*LOCAL.by_flag, *LOCAL.switches} - their_flags() == OUR_FLAGS


@pytest.mark.parametrize("place", [place for place in SURFACE["keys"] if place.endswith("_config")])
def test_every_key_of_a_nested_section_exists_and_no_others(place):
    theirs = set(SURFACE["keys"][place])
    fields = {bound.keys[0] for bound in LOCAL.options if bound.file_key == place}
    moved = {"gradient_accumulation_steps"} if place == "deepspeed_config" else set()
    assert fields == (theirs - moved) | OUR_KEYS.get(place, set())


def test_the_names_that_the_wizard_of_accelerate_writes_are_read():
    for key in SURFACE["keys"]["fp8_config written by its wizard"]:
        assert ("fp8_config", key) in LOCAL.by_key


@pytest.mark.parametrize(("root", "environment"), [(LOCAL, "LOCAL_MACHINE"), (SAGEMAKER, "AMAZON_SAGEMAKER")])
def test_every_top_level_key_exists_and_no_others(root, environment):
    top = {bound.keys[0] for bound in root.options if bound.keys and bound.file_key is None}
    ours = OUR_KEYS[environment] | ({"fp8_config"} if environment == "AMAZON_SAGEMAKER" else set())
    assert top | set(root.file_keys) | {"compute_environment"} == set(SURFACE["keys"][environment]) | ours


def test_every_variable_of_accelerate_is_an_option_or_belongs_to_somebody():
    theirs = {name for names in SURFACE["variables"].values() for name in names}
    options = variables(complete_root()) | variables(SageMakerConfig)
    tests = {
        "ACCELERATE_NUM_PROCESSES",
        "PYTEST_XDIST_WORKER",
        "RUN_SLOW",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
    }
    unread = {"ACCELERATE_DEBUG_RDV_FILE", "MIXED_PRECISION"}  # the latter is written alone
    assert theirs - options - tests - unread == set(OTHERS) - {"PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"}
    assert options - theirs == OUR_VARIABLES


def test_published_variables_are_frozen():
    assert set(PUBLISHED) == {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "ACCELERATE_USE_DEEPSPEED",
    }  # fmt: skip


def test_launcher_only_fields_are_frozen():
    assert set(launcher_only_fields()) == {
        "num_machines", "gpu_ids", "num_processes", "machine_rank", "main_process_ip",
        "main_process_port", "same_network", "rdzv_backend", "rdzv_conf", "module", "no_python",
        "quiet", "dry_run", "tee", "log_dir", "role", "max_restarts", "monitor_interval",
        "grace_period", "deepspeed.deepspeed_hostfile", "deepspeed.deepspeed_exclusion_filter",
        "deepspeed.deepspeed_inclusion_filter", "deepspeed.deepspeed_multinode_launcher",
        "mpirun.hostfile", "tpu.tpu_name", "tpu.tpu_zone", "tpu.tpu_use_cluster",
        "tpu.tpu_use_sudo", "tpu.command_file", "tpu.commands", "tpu.tpu_vm", "tpu.tpu_env",
        "tpu.main_training_function", "start_timeout", "step_timeout", "checkpoint_timeout", "straggler_report",
        "connect_timeout", "min_machines", "numa_binding", "processes_per", "rdzv_id",
        "signals_to_handle", "spares", "virtual_local_rank", "submit", "submission.job_name", "submission.partition",
        "submission.account", "submission.time", "submission.gpus_per_machine", "submission.cpus_per_task",
        "submission.signal_time", "submission.output", "submission.setup", "submission.args",
        "submission.engine", "submission.memory", "submission.retries", "submission.image",
        "submission.workdir", "submission.env", "submission.secrets", "submission.volumes",
        "submission.shared_memory", "submission.kind", "submission.namespace", "submission.queue",
        "submission.node_selector", "submission.tolerations", "submission.service_account", "submission.address",
    }  # fmt: skip


@pytest.mark.parametrize("root", [LOCAL, SAGEMAKER], ids=["local", "sagemaker"])
def test_names_are_unambiguous_and_every_option_is_described(root):
    for name in ("keys", "flags", "variables"):
        seen = [
            (bound.file_key if name == "keys" else "", spelled)
            for bound in root.options
            for spelled in getattr(bound, name)
        ]
        assert len(seen) == len(set(seen)), name
    for bound in root.options:
        assert bound.about.help.endswith("."), bound.path
        assert bound.carriers - {Carrier.LAUNCHER}, bound.path
        # None means unset, so exactly the fields that may be None have no other default.
        field = root.sections.get(bound.section, root.root).__dataclass_fields__[bound.attribute]
        assert (bound.default is None) == field.type.endswith("| None"), bound.path
