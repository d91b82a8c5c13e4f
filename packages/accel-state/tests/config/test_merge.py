"""Merging: order, origins, defaults of the launcher, and options that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_state.config import Origin, SageMakerConfig, default_path, parse_flags, resolve
from accel_state.errors import ConfigError, ConfigNotFoundError, UnknownKeyError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def merged(flags="", environ=None, file=None, **more):
    parsed = parse_flags(flags.split())
    return resolve(file, environ or {"HF_HOME": "/nowhere"}, parsed, **more)


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


def test_names_of_flags_and_paths_are_accepted_in_a_mapping():
    resolved = resolve(
        environ={},
        flags={"num-processes": "4", "--use_fsdp": True, "fsdp_offload_params": "true"},
        code={"fsdp.min_num_params": 5, "debug": None},
        use_default_file=False,
    )
    config = resolved.config
    assert (config.num_processes, config.use_fsdp, config.fsdp.cpu_offload, config.fsdp.min_num_params) == (
        4,
        True,
        True,
        5,
    )
    assert resolved.origin("debug") is Origin.DEFAULT


def test_truth_values_of_a_mapping_may_be_words():
    given = {"use_fsdp": "false", "cpu": "no"}
    assert resolve(environ={}, flags=given, use_default_file=False).config.distributed_type is None
    with pytest.raises(ConfigError, match="use_fsdp is 'perhaps'; expected true or false"):
        resolve(environ={}, flags={"use_fsdp": "perhaps"}, use_default_file=False)


def test_an_unknown_name_in_a_mapping_is_an_error():
    with pytest.raises(UnknownKeyError, match="did you mean num_processes"):
        resolve(environ={}, flags={"num_proceses": 4})


def test_two_names_for_one_option_must_agree():
    with pytest.raises(ConfigError, match=r"num_processes and nproc_per_node exclude each other"):
        resolve(environ={}, flags={"num_processes": 4, "nproc_per_node": 2})


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
    environ = {"HF_HOME": str(tmp_path)}
    theirs = tmp_path / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 3\n")
    before = theirs.stat()
    resolved = resolve(environ=environ)
    assert resolved.config.num_processes == 3
    assert [note for note in resolved.notes if str(theirs) in note and "Accelerate" in note]
    assert theirs.stat().st_mtime_ns == before.st_mtime_ns
    ours = default_path(environ)
    ours.parent.mkdir()
    ours.write_text("num_processes: 5\n")
    resolved = resolve(environ=environ)
    assert resolved.config.num_processes == 5
    assert resolved.notes == ()
    assert resolve(environ=environ, use_default_file=False).config.num_processes is None


def test_cpu_leaves_the_default_file_aside_and_says_so(tmp_path):
    environ = {"HF_HOME": str(tmp_path)}
    ours = default_path(environ)
    ours.parent.mkdir()
    ours.write_text("num_processes: 5\n")
    resolved = merged("--cpu", environ)
    assert resolved.config.num_processes is None
    assert resolved.file is None
    assert "because of --cpu" in resolved.notes[0]


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


def test_a_parallelism_section_brings_fsdp_2():
    config = merged("--use_fsdp --use_parallelism_config --parallelism_config_tp_size 2").config
    assert config.fsdp.fsdp_version == 2
    assert (config.parallelism.tp_size, config.parallelism.cp_size) == (2, 1)
    assert config.parallelism.cp_comm_strategy is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--multi_gpu --use_fsdp", r"--multi_gpu and --use_fsdp exclude each other"),
        ("--use_deepspeed --use_fsdp", r"--use_deepspeed and --use_fsdp exclude each other"),
        ("--cpu --multi_gpu", r"--cpu contradicts --multi_gpu; .*keep one of them"),
        ("--cpu --tpu", r"--cpu contradicts --tpu"),
        (
            "--multi_gpu --num_processes 1",
            r"--multi_gpu contradicts --num_processes 1; request at least 2 processes",
        ),
        ("--multi_gpu --gpu_ids 3", r"--multi_gpu contradicts --gpu_ids 3; name at least 2 ids"),
        ("--use_parallelism_config", r"--use_parallelism_config needs FSDP.*add --use_fsdp"),
        (
            "--use_parallelism_config --use_fsdp --fsdp_version 1",
            r"--use_parallelism_config needs FSDP version 2, but --fsdp_version 1 was given",
        ),
        ("--module --no_python", r"--module and --no_python exclude each other"),
        (
            "--use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states false",
            r"--fsdp_cpu_ram_efficient_loading loads weights on one .* but --fsdp_sync_module_states False",
        ),
        (
            "--use_deepspeed --deepspeed_config_file ds.json --zero_stage 2 --gradient_accumulation_steps 2",
            r"--gradient_accumulation_steps 2, --zero_stage 2: set in DeepSpeed's own configuration",
        ),
    ],
)
def test_contradictions_name_both_and_what_to_do(flags, message):
    with pytest.raises(ConfigError, match=message):
        merged(flags)


def test_contradictions_inside_a_file_name_the_file(write):
    file = write("distributed_type: MULTI_GPU\nuse_cpu: true\n")
    with pytest.raises(
        ConfigError, match=rf"use_cpu: True in {file} contradicts distributed_type: MULTI_GPU in {file}"
    ):
        merged(file=file)


def test_contradictions_in_the_environment_name_the_variables():
    environ = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "1"}
    with pytest.raises(ConfigError, match="ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP are both on"):
        merged(environ=environ)


def test_the_stronger_origin_wins_a_contradiction_and_it_is_said(write):
    file = write("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    resolved = merged("--cpu", file=file)
    assert (resolved.config.use_cpu, resolved.config.distributed_type) == (True, None)
    assert "distributed_type: MULTI_GPU in" in resolved.notes[0]
    assert "is overridden by --cpu" in resolved.notes[0]
    resolved = merged("--num_processes 1", file=file)
    assert (resolved.config.num_processes, resolved.config.distributed_type) == (1, "NO")
    file = write("use_cpu: true\n")
    resolved = merged("--multi_gpu", file=file)
    assert (resolved.config.use_cpu, resolved.config.distributed_type) == (False, "MULTI_GPU")
    assert resolved.origin("use_cpu") is Origin.FLAG


def test_fsdp_and_deepspeed_may_run_on_the_cpu():
    for flag in ("--use_fsdp", "--use_deepspeed"):
        assert merged(f"--cpu {flag} --num_processes 2").config.use_cpu


def test_several_machines_may_have_one_accelerator_each():
    assert merged("--multi_gpu --num_machines 2 --gpu_ids 0 --num_processes 2").config.multi_accelerator


def test_loading_on_one_process_is_off_where_weights_are_not_sent():
    section = merged("--use_fsdp --fsdp_sync_module_states false").config.fsdp
    assert section.cpu_ram_efficient_loading is False
