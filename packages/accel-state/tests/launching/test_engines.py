"""Options whose engine is not available."""

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError, NotAvailableError
from accel_state.launching.engines import MISSING_SECTIONS, check_available

MISSING = [
    bound for bound in schema_of(LaunchConfig).options if bound.section in MISSING_SECTIONS and bound.flags
]


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
        ["--use_fsdp"], ["--use_deepspeed"], ["--use_megatron_lm"], ["--tpu"], ["--mixed_precision", "fp8"],
        ["--fsdp_version", "2"], ["--downcast_bf16"], ["--use_fsdp", "--use_parallelism_config"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_of_missing_engines_are_refused(flags):
    resolved = resolve(environ={}, flags=parse_flags(flags), use_default_file=False)
    with pytest.raises(NotAvailableError, match=f"^{flags[0]}.*not available in this version"):
        check_available(resolved)


def test_missing_engines_in_a_file_are_refused_by_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")
    with pytest.raises(NotAvailableError, match=r"distributed_type: FSDP in .*config\.yaml"):
        check_available(resolve(file, environ={}))


def test_sagemaker_files_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n"
        "iam_role_name: role\nmixed_precision: 'no'\n"
    )
    with pytest.raises(NotAvailableError, match="SageMaker"):
        check_available(resolve(file, environ={}))


def test_flags_of_a_section_that_says_the_default_are_no_problem():
    flags = parse_flags(["--main_training_function", "main"])
    resolved = resolve(environ={}, flags=flags, use_default_file=False)
    assert check_available(resolved).mixed_precision == "no"
