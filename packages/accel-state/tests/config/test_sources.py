"""Errors name a value by the place where the user set it, and the way out fits that place."""

from __future__ import annotations

import pytest

from accel_state.config import Origin, parse_flags, resolve
from accel_state.errors import AccelError
from accel_state.launching.engines import check_available
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import plan_world


@pytest.fixture
def resolved_from(tmp_path, monkeypatch):
    """A function that resolves one setting from a file, the environment, flags or code."""
    monkeypatch.chdir(tmp_path)

    def from_place(text="", environ=None, flags="", code=None, name="f.yaml"):
        (tmp_path / name).write_text(text)
        file = name if text else None
        return resolve(file, environ or {}, parse_flags(flags.split()), code, use_default_file=False)

    return from_place


def world(resolved_from, **place):
    """What a launch does before it starts anything, on a machine without accelerators."""
    resolved = resolved_from(**place)
    return plan_world(check_available(resolved), Accelerators(), resolved.sources)


@pytest.mark.parametrize(
    ("place", "path", "described", "origin"),
    [
        ({"text": "debug: true\n\nnum_processes: 4\n"}, "num_processes",
         "num_processes: 4 in f.yaml, line 3", Origin.FILE),
        ({"text": "# tabs\n{\"fsdp_config\":\n\t{\"x\": 1}}".replace("# tabs\n", "").replace("x", "fsdp_version"),
          "name": "f.json"}, "fsdp.fsdp_version", "fsdp_config.fsdp_version: 1 in f.json, line 2", Origin.FILE),
        ({"text": "fsdp_config:\n  offload_params: yes\n"}, "fsdp.cpu_offload",
         "fsdp_config.offload_params: true in f.yaml, line 2", Origin.FILE),
        ({"text": "fp16: true\n"}, "mixed_precision", "fp16: fp16 in f.yaml, line 1", Origin.FILE),
        ({"environ": {"ACCELERATE_MIXED_PRECISION": "bf16"}}, "mixed_precision",
         "ACCELERATE_MIXED_PRECISION=bf16 in the environment", Origin.ENVIRONMENT),
        ({"environ": {"ACCELERATE_USE_FSDP": "1"}}, "distributed_type",
         "ACCELERATE_USE_FSDP=1 in the environment", Origin.ENVIRONMENT),
        ({"flags": "--nproc-per-node 4"}, "num_processes", "--nproc-per-node 4", Origin.FLAG),
        ({"flags": "--multi-gpu"}, "distributed_type", "--multi-gpu", Origin.FLAG),
        ({"flags": "--distributed_type multi_gpu"}, "distributed_type", "--distributed_type MULTI_GPU", Origin.FLAG),
        ({"flags": "--no-debug"}, "debug", "--no-debug", Origin.FLAG),
        ({"flags": "--gpu_ids 0,1"}, "gpu_ids", "--gpu_ids 0,1", Origin.FLAG),
        ({"code": {"num_processes": 4}}, "num_processes", "num_processes=4", Origin.CODE),
        ({}, "num_machines", "--num_machines 1", Origin.DEFAULT),
    ],
)  # fmt: skip
def test_a_value_is_described_as_the_user_wrote_it(place, path, described, origin, resolved_from):
    resolved = resolved_from(**place)
    assert resolved.origin(path) is origin
    assert resolved.describe(path) == described


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"text": "distributed_type: MULTI_GPU\n"},
         "distributed_type: MULTI_GPU in f.yaml, line 1 needs accelerators, but none are visible on this machine; "
         "pass --distributed_type NO, pass --cpu to run the processes on the CPU, or edit that line"),
        ({"flags": "--multi_gpu"},
         "--multi_gpu needs accelerators, but none are visible on this machine; leave --multi_gpu out, or pass --cpu "
         "to run the processes on the CPU"),
        ({"environ": {"ACCELERATE_DISTRIBUTED_TYPE": "MULTI_GPU"}},
         "ACCELERATE_DISTRIBUTED_TYPE=MULTI_GPU in the environment needs accelerators, but none are visible on this "
         "machine; unset ACCELERATE_DISTRIBUTED_TYPE, pass --distributed_type NO, or pass --cpu to run the processes "
         "on the CPU"),
        ({"text": "distributed_type: MEGATRON_LM\n"},
         "distributed_type: MEGATRON_LM in f.yaml, line 1 needs GPUs of NVIDIA or AMD, on which megatron-core "
         "computes, and none are visible on this machine; pass --no-use_megatron_lm, or edit that line"),
        ({"environ": {"ACCELERATE_USE_MEGATRON_LM": "true"}},
         "ACCELERATE_USE_MEGATRON_LM=true in the environment needs GPUs of NVIDIA or AMD, on which megatron-core "
         "computes, and none are visible on this machine; unset ACCELERATE_USE_MEGATRON_LM"),
        ({"text": "gpu_ids: 0,1\n"},
         "gpu_ids: 0,1 in f.yaml, line 1 names accelerator 0, but no accelerator was found"),
        ({"text": "num_machines: 2\nmachine_rank: 2\nnum_processes: 2\n"},
         "machine_rank: 2 in f.yaml, line 2 is out of range for 2 machines (num_machines: 2 in f.yaml, line 1)"),
        ({"text": "num_processes: 3\n", "flags": "--nnodes 2"},
         "num_processes: 3 in f.yaml, line 1 is not divisible by --nnodes 2"),
        ({"text": "use_cpu: true\ndistributed_type: MULTI_GPU\n"},
         "use_cpu: true in f.yaml, line 1 contradicts distributed_type: MULTI_GPU in f.yaml, line 2"),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_a_way_out_that_fits_it(place, message, resolved_from):
    with pytest.raises(AccelError) as caught:
        world(resolved_from, **place)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("distributed_type: MULTI_GPU\n", "--distributed_type NO"),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\n", "--cpu"),
        ("distributed_type: MEGATRON_LM\n", "--no-use_megatron_lm"),
        ("mixed_precision: fp8\nfp8_config:\n  backend: MSAMP\n", "--fp8_backend ao"),
        ("mixed_precision: fp8\ndistributed_type: DEEPSPEED\n", "--mixed_precision bf16"),
        ("parallelism_config:\n  tp_size: 2\ndistributed_type: XLA\n", "--no-use_parallelism_config"),
    ],
)
def test_the_advised_flags_lead_out(text, flags, resolved_from):
    with pytest.raises(AccelError) as caught:
        world(resolved_from, text=text)
    assert flags in str(caught.value)
    assert world(resolved_from, text=text, flags=flags).local_size >= 1


def test_a_value_that_another_one_decided_is_described_by_that_one(resolved_from):
    resolved = resolved_from("distributed_type: MULTI_GPU\n", flags="--cpu")
    assert resolved.origin("distributed_type") is Origin.FLAG
    assert resolved.describe("distributed_type") == "--cpu"


def test_a_secret_is_never_described(resolved_from):
    resolved = resolved_from("compute_environment: AMAZON_SAGEMAKER\n", flags="--aws_secret_access_key hush")
    assert resolved.describe("aws_secret_access_key") == "--aws_secret_access_key ***"
