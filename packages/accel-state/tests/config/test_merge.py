"""Merging: order, origins, defaults of the launcher, and options that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_state.config import Origin, SageMakerConfig, default_path, parse_flags, resolve
from accel_state.errors import ConfigError, ConfigNotFoundError, UnknownKeyError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def merged(flags="", environ=None, file=None, **more):
    parsed = parse_flags(flags.split())
    return resolve(file, environ or {"HF_HOME": "/nowhere", "XDG_CONFIG_HOME": "/nowhere"}, parsed, **more)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="f.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_defaults_file_environment_flags_code_in_this_order(write):
    file = write("mixed_precision: fp16\nnum_processes: 2\nmachine_rank: 1\nmain_process_port: 1\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "3"}
    resolved = merged("--num_processes 4 --main_process_port 2", environ, file, code={"main_process_port": 3})
    config = resolved.config
    assert (config.num_processes, config.mixed_precision, config.machine_rank) == (4, "bf16", 1)
    assert (config.main_process_port, config.num_cpu_threads_per_process, config.num_machines) == (3, 3, 1)
    origins = {
        "num_processes": Origin.FLAG,
        "mixed_precision": Origin.ENVIRONMENT,
        "machine_rank": Origin.FILE,
        "main_process_port": Origin.CODE,
        "num_machines": Origin.DEFAULT,
        "fsdp.cpu_offload": Origin.DEFAULT,
    }
    assert {path: resolved.origin(path) for path in origins} == origins
    assert resolved.file == file


def test_an_origin_of_nothing_is_an_error():
    with pytest.raises(UnknownKeyError, match="did you mean mixed_precision"):
        merged().origin("mixed_precison")


@pytest.mark.parametrize(
    ("key", "text", "path"),
    [
        ("rdzv_backend", "c10d", "rdzv_backend"),
        ("same_network", "true", "same_network"),
        ("enable_cpu_affinity", "true", "enable_cpu_affinity"),
        ("downcast_bf16", "true", "tpu.downcast_bf16"),
        ("tpu_use_sudo", "true", "tpu.tpu_use_sudo"),
        ("tpu_use_cluster", "true", "tpu.tpu_use_cluster"),
    ],
)
def test_t15_keys_that_accelerate_ignores_in_files_count(key, text, path, write):
    resolved = merged(file=write(f"{key}: {text}\n"))
    section, _, attribute = path.rpartition(".")
    holder = getattr(resolved.config, section) if section else resolved.config
    assert str(getattr(holder, attribute)).lower() == text
    assert resolved.origin(path) is Origin.FILE


def test_a_file_turns_on_its_distributed_type_and_a_flag_turns_it_off():
    file = CONFIGS / "old_fsdp.yaml"
    assert merged(file=file).config.use_fsdp
    resolved = merged("--no-use_fsdp", file=file)
    assert resolved.config.distributed_type is None
    assert resolved.origin("distributed_type") is Origin.FLAG
    assert resolve(file, {}, {"use_fsdp": False}).config.distributed_type is None
    kept = merged("--no-use_deepspeed", file=file)
    assert kept.config.use_fsdp
    assert kept.origin("distributed_type") is Origin.FILE


def test_the_default_file_is_used_and_accelerates_is_mentioned(tmp_path):
    environ = {"HF_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    theirs = tmp_path / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 3\n")
    before = theirs.stat()
    resolved = resolve(environ=environ)
    assert resolved.config.num_processes == 3
    assert [note for note in resolved.notes if str(theirs) in note and "Accelerate" in note]
    assert theirs.stat().st_mtime_ns == before.st_mtime_ns
    before = tmp_path / "accel/default_config.yaml"
    ours = default_path(environ)
    notes = (f"using {before}; accel config update copies it to {ours}, which is its place now",)
    for count, path, said in ((4, before, notes), (5, ours, ())):
        path.parent.mkdir(parents=True)
        path.write_text(f"num_processes: {count}\n")
        resolved = resolve(environ=environ)
        assert (resolved.config.num_processes, resolved.file, resolved.notes) == (count, path, said)
    assert resolve(environ=environ, use_default_file=False).config.num_processes is None


def test_cpu_overrides_what_the_default_file_says_of_accelerators(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    ours = default_path(environ)
    ours.parent.mkdir()
    ours.write_text("num_processes: 2\ndistributed_type: MULTI_GPU\ngpu_ids: 0,1\nmixed_precision: bf16\n")
    resolved = merged("--cpu", environ)
    assert (resolved.file, resolved.config.num_processes, resolved.config.mixed_precision) == (
        ours,
        2,
        "bf16",
    )
    assert (resolved.config.use_cpu, resolved.config.distributed_type, resolved.config.gpu_ids) == (
        True,
        None,
        "all",
    )
    assert resolved.notes == (
        f"gpu_ids: 0,1 in {ours}, line 3 is overridden by --cpu",
        f"distributed_type: MULTI_GPU in {ours}, line 2 is overridden by --cpu",
    )


def test_a_named_file_must_exist():
    with pytest.raises(ConfigNotFoundError, match="nowhere"):
        merged(file="/nowhere/f.yaml")


def test_a_sagemaker_file_makes_a_sagemaker_configuration():
    resolved = merged("--mixed_precision fp16 --aws_access_key_id k", file=CONFIGS / "sagemaker.yaml")
    assert isinstance(resolved.config, SageMakerConfig)
    assert (resolved.config.mixed_precision, resolved.config.aws_access_key_id) == ("fp16", "k")
    with pytest.raises(ConfigError, match="describes a SageMaker job"):
        resolved.local()
    with pytest.raises(ConfigError, match="--num_processes is for a local run"):
        merged("--num_processes 2", file=CONFIGS / "sagemaker.yaml")
    with pytest.raises(ConfigError, match="--aws_access_key_id is for a SageMaker job"):
        merged("--aws_access_key_id k")


def test_an_active_section_gets_the_defaults_of_the_launcher():
    section = merged("--use_fsdp").config.fsdp
    assert (section.fsdp_version, section.sharding_strategy, section.use_orig_params) == (
        1,
        "FULL_SHARD",
        True,
    )
    assert (section.min_num_params, section.sync_module_states) == (100_000_000, True)
    assert section.reshard_after_forward is None
    second = merged("--use_fsdp --fsdp_version 2").config.fsdp
    assert second.reshard_after_forward is True
    assert (second.sharding_strategy, second.use_orig_params, second.sync_module_states) == (None, None, None)
    fp8 = merged("--mixed_precision fp8 --fp8_backend te").config.fp8
    assert (fp8.amax_history_len, fp8.amax_compute_algo, fp8.fp8_format) == (1024, "most_recent", "HYBRID")
    assert merged().config.fsdp.min_num_params is None
    assert merged().origin("mixed_precision") is Origin.DEFAULT
    assert merged().config.mixed_precision == "no"


def test_a_chosen_fallback_is_not_overruled_by_a_default():
    section = merged("--use_fsdp --fsdp_reshard_after_forward SHARD_GRAD_OP").config.fsdp
    assert (section.sharding_strategy, section.reshard_after_forward) == (None, "SHARD_GRAD_OP")


def test_contradictions_in_the_environment_name_the_variables():
    environ = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "1"}
    with pytest.raises(ConfigError, match="ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP are both on"):
        merged(environ=environ)


@pytest.mark.parametrize(
    ("flags", "total"),
    [
        ("--nproc_per_node 4", 4),
        ("--nnodes 2 --nproc-per-node 4", 8),
        ("--nproc_per_node 2 --nnodes 1:3", 6),
        ("--num_machines 2 --num_processes 4", 4),
        ("--nproc_per_node 3 --num_machines 2 --num_processes 4", 4),
    ],
)
def test_a_flag_of_torchrun_counts_the_processes_of_each_machine(flags, total):
    assert merged(flags).config.num_processes == total


def test_processes_of_each_machine_are_described_as_typed(write):
    resolved = merged("--nproc_per_node 2", file=write("num_machines: 3\n"))
    assert resolved.config.num_processes == 6
    assert resolved.describe("num_processes") == "--nproc_per_node 2"
