"""The variables of ranks: written and read as Accelerate does, and published sparingly."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from accel_state.config import (
    PUBLISHED,
    LaunchConfig,
    SageMakerConfig,
    decode,
    encode,
    parse_flags,
    publish,
    rank_environment,
    resolve,
    variables,
)
from accel_state.config.unknown_variables import unknown_variables
from accel_state.errors import ConfigError


def launched(flags):
    return resolve(environ={}, flags=parse_flags(flags.split()), use_default_file=False).config


def test_fsdp_reaches_the_ranks_as_accelerate_would_write_it():
    found = encode(launched("--use_fsdp --fsdp_version 1 --fsdp_offload_params true --mixed_precision bf16"))
    assert found == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }


def test_fp8_reaches_the_ranks():
    found = encode(
        launched("--mixed_precision fp8 --fp8_backend te --fp8_override_linear_precision true,false,true")
    )
    assert found["ACCELERATE_FP8_BACKEND"] == "TE"  # the library only knows upper case
    assert found["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "1024"
    assert found["ACCELERATE_FP8_FORMAT"] == "HYBRID"
    assert found["ACCELERATE_FP8_PAD_INNER_DIM"] == "1"
    overrides = [found[f"ACCELERATE_FP8_OVERRIDE_{name}"] for name in ("FPROP", "DGRAD", "WGRAD")]
    assert overrides == ["true", "false", "true"]


def test_t15_deepspeed_nvme_paths_reach_the_ranks():
    found = encode(
        launched(
            "--use_deepspeed --zero_stage 3 --offload_param_device nvme --offload_param_nvme_path /a "
            "--offload_optimizer_nvme_path /b --gradient_accumulation_steps 2 --zero3_init_flag true"
        )
    )
    assert found["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] == "/a"
    assert found["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"] == "/b"
    assert found["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"
    assert found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    assert set(found["ACCELERATE_CONFIG_DS_FIELDS"].split(",")) == {
        "zero_stage",
        "offload_param_device",
        "offload_param_nvme_path",
        "offload_optimizer_nvme_path",
        "gradient_accumulation_steps",
        "zero3_init_flag",
    }


def test_parallelism_megatron_dynamo_and_the_rest_reach_the_ranks():
    mesh = encode(launched("--use_fsdp --use_parallelism_config --parallelism_config_cp_size 2"))
    assert mesh["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (mesh["PARALLELISM_CONFIG_CP_SIZE"], mesh["PARALLELISM_CONFIG_TP_SIZE"]) == ("2", "1")
    assert mesh["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"
    assert mesh["FSDP_VERSION"] == "2"
    megatron = encode(launched("--use_megatron_lm --megatron_lm_tp_degree 2"))
    assert (megatron["ACCELERATE_USE_MEGATRON_LM"], megatron["MEGATRON_LM_TP_DEGREE"]) == ("true", "2")
    assert megatron["MEGATRON_LM_GRADIENT_CLIPPING"] == "1.0"
    other = encode(launched("--cpu --debug --dynamo_backend inductor --enable_cpu_affinity --resume"))
    assert other["ACCELERATE_USE_CPU"] == "true"
    assert other["ACCELERATE_DEBUG_MODE"] == "true"
    assert other["ACCELERATE_CPU_AFFINITY"] == "1"
    assert other["ACCELERATE_RESUME"] == "true"
    assert other["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert "ACCELERATE_DYNAMO_USE_DYNAMIC" not in other  # unset: torch.compile finds out


def test_bf16_on_tpus_is_autocast():
    """XLA_USE_BF16 and XLA_DOWNCAST_BF16 would store parameters in bf16, too; the latter is --downcast_bf16."""
    found = encode(launched("--tpu --mixed_precision bf16"))
    assert (found["ACCELERATE_DISTRIBUTED_TYPE"], found["ACCELERATE_MIXED_PRECISION"]) == ("XLA", "bf16")
    assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & found.keys()
    downcast = encode(launched("--tpu --mixed_precision bf16 --downcast_bf16"))
    assert downcast.keys() - found.keys() == {"ACCELERATE_DOWNCAST_BF16", "XLA_DOWNCAST_BF16"}
    assert "XLA_DOWNCAST_BF16" not in encode(launched("--mixed_precision bf16 --downcast_bf16"))


def test_a_sagemaker_job_is_marked():
    found = encode(SageMakerConfig(distributed_type="DATA_PARALLEL", mixed_precision="fp16"))
    assert found["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert found["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"


def test_secrets_travel_neither_to_jobs_nor_to_files():
    config = SageMakerConfig(aws_access_key_id="key", aws_secret_access_key="geheim", profile="me")
    assert not {"key", "geheim"} & {*encode(config).values(), *map(str, config.to_dict().values())}


def test_what_accelerate_writes_is_read():
    config = decode(
        {
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_USE_CPU": "True",
            "ACCELERATE_DEBUG_MODE": "true",
            "ACCELERATE_CPU_AFFINITY": "1",
            "ACCELERATE_DYNAMO_BACKEND": "NO",
            "ACCELERATE_DYNAMO_MODE": "default",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "ACCELERATE_FP8_BACKEND": "te",
            "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
            "ACCELERATE_FP8_OVERRIDE_DGRAD": "True",
            "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
            "OMP_NUM_THREADS": "4,2",
            "FSDP_STATE_DICT_TYPE": "",
        }
    )
    assert config.use_fsdp
    assert (config.mixed_precision, config.use_cpu, config.debug, config.enable_cpu_affinity) == (
        "bf16",
        True,
        True,
        True,
    )
    assert not config.is_active("dynamo")
    assert config.fsdp.transformer_cls_names_to_wrap == ("A", "B")
    assert config.fsdp.reshard_after_forward is True
    assert config.fsdp.state_dict_type is None
    assert (config.fp8.backend, config.fp8.override_linear_precision) == ("TE", (False, True, False))
    assert config.parallelism.sp_seq_length is None
    assert config.gradient_accumulation_steps is None
    assert config.num_cpu_threads_per_process == 4


def test_an_empty_environment_is_a_default_configuration():
    assert decode({}) == LaunchConfig()
    assert decode(encode(LaunchConfig())) == LaunchConfig()


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp17", "one of no, fp16, bf16, fp8"),
        ("FSDP_VERSION", "three", "an integer"),
        ("ACCELERATE_USE_FSDP", "maybe", "true or false"),
        ("ACCELERATE_FP8_OVERRIDE_FPROP", "maybe", "true or false"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, expected):
    with pytest.raises(
        ConfigError, match=f"environment variable {variable} is '{text}'; expected {expected}"
    ):
        decode({variable: text})


def test_a_child_does_not_inherit_what_the_configuration_does_not_say():
    inherited = {"PATH": "/bin", "ACCELERATE_DEBUG_MODE": "true", "FSDP_VERSION": "2", "XLA_USE_BF16": "1"}
    assert rank_environment(LaunchConfig(use_cpu=True), inherited) == {
        "PATH": "/bin",
        "ACCELERATE_USE_CPU": "true",
    }


def test_everything_that_is_encoded_is_in_the_list_of_variables():
    for flags in (
        "--use_deepspeed --zero_stage 2",
        "--tpu --mixed_precision bf16",
        "--tpu --mixed_precision bf16 --downcast_bf16",
    ):
        assert set(encode(launched(flags))) <= variables()
    assert set(encode(SageMakerConfig())) <= variables(SageMakerConfig)


@dataclass
class Place:
    rank: int = 1
    world_size: int = 2
    local_rank: int = 1
    local_world_size: int = 2
    master_addr: str | None = "127.0.0.1"
    master_port: int | None = None


def test_publish_sets_only_missing_variables_of_its_table():
    config = launched("--use_fsdp --fsdp_version 2 --mixed_precision bf16")
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16", "LOCAL_RANK": ""}
    done = publish(config, environ, Place())
    assert environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert environ["LOCAL_RANK"] == ""
    assert done == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    assert set(done) <= set(PUBLISHED)
    assert publish(config, environ, Place()) == {}


def test_the_schema_loads_neither_torch_nor_yaml():
    code = (
        "import sys, accel_state.config as c; c.parse_flags(['--cpu']);"
        "c.resolve(environ={}, use_default_file=False);"
        "print([m for m in ('torch', 'yaml', 'json', 'logging', 'typer') if m in sys.modules])"
    )
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.strip() == "[]"


def test_variables_of_ours_that_nothing_reads_are_told_with_the_nearest():
    environ = {
        "ACCELERATE_MIXED_PRECSION": "bf16",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCEL_DEVICE_CUONT": "2",
        "ACCEL_DEVICE_COUNT": "2",
        "ACCEL_RUN_FOLDER": "/tmp",
        "FSDP_OFFLOAD_PARAM": "true",
        "ACCEL_TEST_SIZE": "3",
        "ACCELERATION": "fast",
        "NCCL_DEBG": "INFO",
    }
    assert unknown_variables(environ) == {
        "ACCELERATE_MIXED_PRECSION": ["ACCELERATE_MIXED_PRECISION"],
        "ACCEL_DEVICE_CUONT": ["ACCEL_DEVICE_COUNT"],
        "FSDP_OFFLOAD_PARAM": ["FSDP_OFFLOAD_PARAMS"],
    }


@pytest.mark.parametrize(
    "name",
    ["ACCEL_PROJECT", "FSDP_MY_SIZE", "ACCELERATE_TEAM", "ACCELERATE_USE_FP8", "ACCELERATE_DISABLE_RICH"],
)
def test_plausible_variables_of_others_resemble_none(name):
    assert unknown_variables({name: "1"}) == {name: []}
