"""Options that the engine of a run does not have, and engines that do not go together."""

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError, DeviceError, NotAvailableError
from accel_state.launching.engines import check_available, unused_options
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import plan_world


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("use_custom_fsdp", "true"), ("overlap_cpu_optimizer_d2h_h2d", "true"), ("optimizer_cpu_offload", "true"),
        ("use_precision_aware_optimizer", "true"),
        ("expert_model_parallel_size", "2"), ("expert_tensor_parallel_size", "2"),
    ],
)  # fmt: skip
def test_what_megatron_has_and_we_do_not_is_refused_with_what_there_is_instead(name, words):
    flag = f"--megatron_lm_{name}"
    flags = parse_flags(["--use_megatron_lm", flag, words])
    with pytest.raises(
        NotAvailableError, match=rf"^{flag}.*not available in this version: .*; leave {flag} out"
    ):
        check_available(resolve(environ={}, flags=flags, use_default_file=False))
    off = "1" if words == "2" else "false"
    flags = parse_flags(["--use_megatron_lm", flag, off])
    assert check_available(resolve(environ={}, flags=flags, use_default_file=False)).use_megatron_lm


def test_megatron_needs_gpus():
    flags = parse_flags(["--use_megatron_lm", "--cpu"])
    with pytest.raises(
        ConfigError, match=r"^--use_megatron_lm contradicts --cpu: megatron-core computes on GPUs"
    ):
        check_available(resolve(environ={}, flags=flags, use_default_file=False))
    resolved = resolve(environ={}, flags=parse_flags(["--use_megatron_lm"]), use_default_file=False)
    for found in (Accelerators(), Accelerators("npu", 2, 2, "ASCEND_RT_VISIBLE_DEVICES")):
        with pytest.raises(DeviceError, match=r"^--use_megatron_lm needs GPUs of NVIDIA or AMD.*leave"):
            plan_world(check_available(resolved), found, resolved.sources)
    assert plan_world(resolved.config, Accelerators("cuda", 2, 2, "CUDA_VISIBLE_DEVICES")).size == 2


@pytest.mark.parametrize("words", ["--tpu_cluster", "--downcast_bf16 --mixed_precision bf16"])
def test_options_of_tpus_need_tpus(words):
    flags = parse_flags(words.split())
    with pytest.raises(ConfigError, match=f"^{words.split()[0]} is for TPUs.*add --tpu"):
        check_available(resolve(environ={}, flags=flags, use_default_file=False))
    flags = parse_flags(["--tpu", *words.split()])
    assert check_available(resolve(environ={}, flags=flags, use_default_file=False)).use_tpu


def test_downcasting_needs_bf16():
    flags = parse_flags(["--tpu", "--downcast_bf16"])
    with pytest.raises(ConfigError, match="needs mixed_precision bf16, but it is no"):
        check_available(resolve(environ={}, flags=flags, use_default_file=False))


def test_flags_of_tpus_that_nothing_uses_are_named():
    resolved = resolve(environ={}, flags=parse_flags(["--tpu_zone", "here"]), use_default_file=False)
    assert unused_options(resolved)[0].endswith("to select it, add --tpu")
    flags = parse_flags(["--tpu", "--tpu_zone", "here"])
    assert unused_options(resolve(environ={}, flags=flags, use_default_file=False)) == []


def test_degrees_that_nothing_uses_are_named():
    flags = parse_flags(["--parallelism_config_tp_size", "2"])
    unused = unused_options(resolve(environ={}, flags=flags, use_default_file=False))
    assert unused[0].endswith("to select it, add --use_parallelism_config")
    flags = parse_flags(["--use_parallelism_config", "--parallelism_config_tp_size", "2"])
    assert unused_options(resolve(environ={}, flags=flags, use_default_file=False)) == []


def checked(words, **environ):
    resolved = resolve(environ=environ, flags=parse_flags(words.split()), use_default_file=False)
    return check_available(resolved), unused_options(resolved)


@pytest.mark.parametrize("engine", ["", "--use_fsdp", "--multi_gpu"])
def test_fp8_runs_with_whole_and_with_sharded_models(engine):
    config, _ = checked(f"{engine} --mixed_precision fp8 --fp8_backend ao --fp8_pad_inner_dim false")
    assert (config.fp8.backend, config.fp8.pad_inner_dim) == ("AO", False)


@pytest.mark.parametrize("words", ["--fp8_backend msamp", "--mixed_precision fp8 --fp8_backend MSAMP"])
def test_msamp_is_refused_with_what_replaces_it(words):
    with pytest.raises(NotAvailableError, match=r"--fp8_backend.*MS-AMP.*--fp8_backend ao.*--fp8_backend te"):
        checked(words)
    with pytest.raises(NotAvailableError, match=r"ACCELERATE_FP8_BACKEND.*MS-AMP"):
        checked("--mixed_precision fp8", ACCELERATE_FP8_BACKEND="msamp")


@pytest.mark.parametrize(("words", "engine"), [("--use_deepspeed", "DeepSpeed"), ("--tpu", "TPUs")])
def test_fp8_is_refused_with_engines_that_have_none(words, engine):
    with pytest.raises(NotAvailableError, match=f"--mixed_precision fp8 does not run with {engine} .{words}"):
        checked(f"{words} --mixed_precision fp8")


def test_flags_of_fp8_that_nothing_uses_are_named():
    [note] = checked("--fp8_margin 2")[1]
    assert note == (
        "--fp8_margin is used only if the script chooses fp8 itself; to select it, add --mixed_precision fp8"
    )
    notes = checked("--mixed_precision fp8 --fp8_backend ao --fp8_margin 2 --fp8_pad_inner_dim false")[1]
    assert [note for note in notes if "installed" not in note] == [
        "--fp8_margin 2 is an option of TE, but fp8 uses AO; it is not used"
    ]


@pytest.mark.parametrize(("backend", "needed"), [("ao", "torchao"), ("te", "transformer-engine")])
def test_a_library_of_fp8_that_is_not_installed_is_named(backend, needed, monkeypatch):
    for name in ("is_torchao_available", "is_transformer_engine_available"):
        monkeypatch.setattr(f"accel_state.host.available.{name}", lambda: False)
    [note] = checked(f"--mixed_precision fp8 --fp8_backend {backend}")[1]
    assert note.startswith(f"--mixed_precision fp8 needs {needed}, which is not installed here; pip install ")
    monkeypatch.setattr("accel_state.host.available.is_torchao_available", lambda: True)
    assert checked("--mixed_precision fp8")[1] == []


def test_one_tpu_machine_is_available():
    resolved = resolve(environ={}, flags=parse_flags(["--tpu"]), use_default_file=False)
    assert check_available(resolved).use_tpu


def test_sagemaker_files_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n"
        "iam_role_name: role\nmixed_precision: 'no'\n"
    )
    with pytest.raises(NotAvailableError, match="SageMaker job, which only accel launch starts"):
        check_available(resolve(file, environ={}))


def test_flags_of_a_section_that_says_the_default_are_no_problem():
    flags = parse_flags(["--main_training_function", "main"])
    resolved = resolve(environ={}, flags=flags, use_default_file=False)
    assert check_available(resolved).mixed_precision == "no"
