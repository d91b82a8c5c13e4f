"""The one table of engines that are not available, what derives from it, and options that ask for one."""

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.config.schema import schema_of
from accel_state.environment import decode, patch_environment
from accel_state.errors import ConfigError, NotAvailableError
from accel_state.launching.engines import (
    MISSING_ENGINES,
    MISSING_SECTIONS,
    MISSING_TYPES,
    check_available,
    missing_engine,
    missing_engines,
    unused_options,
    variable_of,
)

MISSING = [
    bound for bound in schema_of(LaunchConfig).options if bound.section in MISSING_SECTIONS and bound.flags
]


@pytest.mark.parametrize("engine", MISSING_ENGINES, ids=lambda engine: engine.name)
def test_every_row_names_a_section_and_a_choice_of_the_schema(engine):
    schema = schema_of(LaunchConfig)
    assert engine.section in schema.sections
    bound = schema.by_path[engine.option]
    assert engine.value is True if bound.default is False else engine.value in bound.about.choices


@pytest.mark.parametrize("engine", MISSING_ENGINES, ids=lambda engine: engine.name)
def test_the_variable_of_an_engine_asks_for_it(engine):
    name = variable_of(engine)
    with patch_environment(**{name: "true" if "_USE_" in name else engine.value}):
        assert missing_engines(decode()) == [engine]


def test_what_exists_is_not_missing():
    assert missing_engines(LaunchConfig()) == []
    assert missing_engine("distributed_type", "MULTI_GPU") is None
    assert missing_engine("mixed_precision", "bf16") is None
    assert missing_engine("mixed_precision", "MEGATRON_LM") is None
    assert missing_engine("distributed_type", "MEGATRON_LM").section == "megatron_lm"
    assert missing_engine("distributed_type", "DEEPSPEED") is None
    assert missing_engine("distributed_type", "FSDP") is None
    assert missing_engine("use_parallelism_config", True) is None


def test_the_tables_of_the_launcher_follow_from_the_one():
    assert set(MISSING_SECTIONS) == {engine.section for engine in MISSING_ENGINES}
    assert all(missing_engine("distributed_type", kind).name == name for kind, name in MISSING_TYPES.items())


@pytest.mark.parametrize("bound", MISSING, ids=lambda bound: bound.path)
def test_no_flag_of_a_missing_engine_is_ignored(bound):
    words = [*bound.about.choices, "2", "7", "0.25", "true", "false", "true,true,false"]
    for word in words:
        try:
            value = bound.parse(word, "")
        except ConfigError:
            continue
        if value not in (None, bound.default):
            break
    resolved = resolve(environ={}, flags={bound.path: value}, use_default_file=False)
    with pytest.raises(NotAvailableError, match=bound.label):
        check_available(resolved)


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_megatron_lm"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_of_missing_engines_are_refused(flags):
    resolved = resolve(environ={}, flags=parse_flags(flags), use_default_file=False)
    with pytest.raises(NotAvailableError, match=f"^{flags[0]}.*not available in this version"):
        check_available(resolved)


def test_missing_engines_in_a_file_are_refused_by_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MEGATRON_LM\nnum_processes: 2\n")
    with pytest.raises(NotAvailableError, match=r"distributed_type: MEGATRON_LM in .*config\.yaml"):
        check_available(resolve(file, environ={}))


@pytest.mark.parametrize("words", ["--tpu_cluster", "--downcast_bf16 --mixed_precision bf16"])
def test_options_of_tpus_need_tpus(words):
    flags = parse_flags(words.split())
    with pytest.raises(ConfigError, match=f"^{words.split()[0].replace('tpu_c', 'tpu_use_c')}.*add --tpu"):
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
        "--fp8_margin 2 is for fp8 by TE, and AO computes it; it is not used"
    ]


@pytest.mark.parametrize(("backend", "needed"), [("ao", "torchao"), ("te", "transformer-engine")])
def test_a_library_of_fp8_that_is_not_installed_is_named(backend, needed, monkeypatch):
    for name in ("is_torchao_available", "is_transformer_engine_available"):
        monkeypatch.setattr(f"accel_state.launching.engines.{name}", lambda: False)
    [note] = checked(f"--mixed_precision fp8 --fp8_backend {backend}")[1]
    assert note.startswith(f"--mixed_precision fp8 needs {needed}, which is not installed here; pip install ")
    monkeypatch.setattr("accel_state.launching.engines.is_torchao_available", lambda: True)
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
