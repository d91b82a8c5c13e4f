"""Flags: spellings, truth values, choices, switches, and what stands after the script."""

from __future__ import annotations

import pytest

from accel_state.config import parse_flags
from accel_state.errors import ConfigError, UnknownKeyError


def values(*words):
    return parse_flags(words).values


def test_dashes_and_underscores_are_the_same():
    expected = {"num_processes": 2, "main_process_port": 0}
    assert values("--num_processes", "2", "--main_process_port", "0") == expected
    assert values("--num-processes=2", "--main-process_port=0") == expected


def test_everything_after_the_script_belongs_to_it():
    parsed = parse_flags(["--cpu", "train.py", "--num_processes", "3", "--unknown"])
    assert parsed.values == {"use_cpu": True}
    assert parsed.rest == ("train.py", "--num_processes", "3", "--unknown")


def test_two_dashes_end_the_flags():
    assert parse_flags(["--debug", "--", "--odd-name.py", "x"]).rest == ("--odd-name.py", "x")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--debug"], True),
        (["--no-debug"], False),
        (["--no_debug"], False),
        (["--debug=false"], False),
        (["--debug=True"], True),
    ],
)
def test_t16_toggles_are_real_booleans(words, value):
    assert values(*words) == {"debug": value}


@pytest.mark.parametrize("text", ["False", "false", "no", "0", "off"])
def test_t16_false_is_false(text):
    for flag in (
        "--megatron_lm_no_load_optim",
        "--fsdp_offload_params",
        "--parallelism_config_sp_seq_length_is_variable",
    ):
        assert list(values(flag, text).values()) == [False]
        assert list(values(f"{flag}={text}").values()) == [False]


def test_t16_a_truth_flag_needs_no_word():
    parsed = parse_flags(["--fsdp_offload_params", "train.py"])
    assert parsed.values == {"fsdp.cpu_offload": True}
    assert parsed.rest == ("train.py",)
    assert values("--no-fsdp_offload_params") == {"fsdp.cpu_offload": False}


def test_a_toggle_does_not_swallow_a_program_called_true():
    parsed = parse_flags(["--no_python", "true"])
    assert parsed.values == {"no_python": True}
    assert parsed.rest == ("true",)


def test_t16_choices_are_found_in_any_case():
    assert values("--fp8_backend", "te") == {"fp8.backend": "TE"}
    assert values("--fp8_backend", "msamp") == {"fp8.backend": "MSAMP"}
    assert values("--dynamo_backend", "inductor") == {"dynamo.backend": "INDUCTOR"}
    assert values("--mixed_precision", "BF16") == {"mixed_precision": "bf16"}
    assert values("--fsdp_sharding_strategy", "full_shard") == {"fsdp.sharding_strategy": "FULL_SHARD"}


@pytest.mark.parametrize("text", ["torchxla_trace_once", "torhchxla_trace_once"])
def test_t16_the_misspelt_backend_of_accelerate_is_read_as_the_right_one(text):
    assert values("--dynamo_backend", text) == {"dynamo.backend": "TORCHXLA_TRACE_ONCE"}


def test_a_strategy_or_a_truth_value():
    path = "fsdp.reshard_after_forward"
    assert values("--fsdp_reshard_after_forward", "false") == {path: False}
    assert values("--fsdp_reshard_after_forward", "SHARD_GRAD_OP") == {path: "SHARD_GRAD_OP"}
    assert values("--fsdp_reshard_after_forward", "2") == {path: "SHARD_GRAD_OP"}


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("--multi_gpu", "MULTI_GPU"),
        ("--tpu", "XLA"),
        ("--use_deepspeed", "DEEPSPEED"),
        ("--use-fsdp", "FSDP"),
        ("--use_megatron_lm", "MEGATRON_LM"),
    ],
)
def test_switches_stand_for_a_distributed_type(flag, kind):
    assert values(flag) == {"distributed_type": kind}
    denied = parse_flags([f"--no-{flag[2:]}"])
    assert denied.values == {}
    assert denied.denied == (("distributed_type", kind),)
    assert parse_flags([flag, f"--no-{flag[2:]}"]).values == {}
    assert parse_flags([f"{flag}=false"]) == denied


def test_two_switches_exclude_each_other():
    with pytest.raises(ConfigError, match=r"--multi_gpu and --use_fsdp exclude each other"):
        values("--multi_gpu", "--use_fsdp")


def test_lists_collect():
    assert values("--vm", "a", "--vm=b") == {"tpu.tpu_vm": ("a", "b")}


def test_three_truth_values():
    expected = {"fp8.override_linear_precision": (True, False, False)}
    assert values("--fp8_override_linear_precision", "true,false,false") == expected
    assert values("--fp8_override_linear_precision", "(True, False, False)") == expected


def test_aliases_and_short_flags():
    assert values("--nproc_per_node", "2", "-m", "-q", "-t", "3") == {
        "num_processes": 2,
        "module": True,
        "quiet": True,
        "tee": "3",
    }
    assert values("--no_tpu_cluster") == {"tpu.tpu_use_cluster": False}


def test_flags_of_a_sagemaker_job_are_known():
    assert values("--aws_access_key_id", "x") == {"aws_access_key_id": "x"}


def test_the_command_may_have_flags_of_its_own():
    parsed = parse_flags(
        ["--config-file", "x.yaml", "--verbose", "s.py"], {"config_file": True, "verbose": False}
    )
    assert parsed.others == {"config_file": "x.yaml", "verbose": True}
    assert parsed.rest == ("s.py",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_proceses", "2"], r"flag --num_proceses does not exist; did you mean --num_processes"),
        (["--use_fdsp"], r"--use_fdsp does not exist; did you mean --use_fsdp"),
        (["--no-num_processes"], r"--no_num_processes does not exist"),
        (["-z"], r"flag -z does not exist"),
        (["--lr", "0.1", "train.py"], r"flag --lr does not exist; a flag of train.py comes after it$"),
        (["--seed=3", "train.py"], r"flag --seed does not exist; a flag of train.py comes after it$"),
    ],
)
def test_unknown_flags_are_errors_with_a_suggestion(words, message):
    with pytest.raises(UnknownKeyError, match=message):
        values(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes"], r"--num_processes needs a value"),
        (["--num_processes", "two"], r"--num_processes is 'two'; expected an integer"),
        (["--num_processes", "0"], r"expected an integer from 1 to 1000000"),
        (["--debug=maybe"], r"--debug is 'maybe'; expected true or false"),
        (["--use_fsdp=maybe"], r"--use_fsdp is 'maybe'; expected true or false"),
        (["--mixed_precision", "fp17"], r"--mixed_precision is 'fp17'; expected one of no, fp16, bf16, fp8"),
        (["--monitor_interval", "nan"], r"expected a number"),
    ],
)
def test_wrong_values_are_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        values(*words)


def test_secrets_are_not_shown():
    from accel_state.config import SageMakerConfig

    assert "geheim" not in repr(SageMakerConfig(aws_secret_access_key="geheim"))


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--ipex", "IPEX is part of PyTorch now"),
        ("--mpirun-ccl=1", "CCL_WORKER_COUNT"),
        ("--use_xpu", "PyTorch finds the device"),
        ("--fp16", "--mixed_precision fp16"),
        ("--rdzv-endpoint=a:1", "--main_process_ip and --main_process_port"),
    ],
)
def test_flags_of_other_launchers_are_answered_with_ours(flag, instead):
    with pytest.raises(UnknownKeyError, match=f"flag {flag.partition('=')[0]} does not exist: .*{instead}"):
        parse_flags([flag, "x.py"])


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--nproc_per_node", "gpu"], {"processes_per": "gpu"}),
        (["--nproc-per-node=CPU"], {"processes_per": "cpu"}),
        (["--nproc_per_node", "4"], {"num_processes": 4}),
    ],
)
def test_words_of_torchrun_count_the_processes(words, values):
    assert parse_flags([*words, "x.py"]).values == values


def test_what_nproc_per_node_can_be():
    with pytest.raises(
        ConfigError, match="--nproc_per_node is 'all'; expected a number of processes, or gpu, cpu, auto"
    ):
        parse_flags(["--nproc_per_node", "all", "x.py"])


def test_all_wrong_flags_are_told_one_a_line():
    with pytest.raises(ConfigError) as told:
        parse_flags(["--mixed_precision=bf17", "--num_procesess=2", "--num_machines", "none", "x.py"])
    heading, *lines = str(told.value).splitlines()
    assert heading == "3 errors:"
    assert [line.split()[1 if "flag" in line else 0] for line in lines] == [
        "--mixed_precision",
        "--num_procesess",
        "--num_machines",
    ]
