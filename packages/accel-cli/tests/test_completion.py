"""Completion: what can stand at the cursor, in the form that the scripts of bash, zsh and fish expect."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from accel_cli.app import COMMANDS, app
from accel_cli.completion import answer, complete, complete_flags
from accel_state.config.roots import complete_root
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import schema_of


def words(*line):
    items = complete(line[:-1], line[-1])
    return None if items is None else [item.value for item in items]


def test_every_flag_of_the_schema_is_offered_with_its_help():
    offered = {item.value: item.help for item in complete(["launch"], "-")}
    for root in (complete_root(), SageMakerConfig):
        for bound in schema_of(root).options:
            for flag in (*bound.flags, *bound.about.switches):
                assert flag in offered
                assert offered[flag]
    assert {"--help", "--help-all", "--config_file", "-m", "-q"} <= set(offered)
    assert all(flag.startswith("-") for flag in offered)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("la",), ["launch"]),
        (("",), list(COMMANDS)),
        (("config", "s"), ["set", "show"]),
        (("config", "validate", "--j"), ["--json"]),
        (("config", "default", "--mixed-"), ["--mixed-precision"]),
        (("config", "show", "--or"), ["--origin"]),
        (("config", "show", "--mixed_precision", "b"), ["bf16"]),
        (("launch", "--num_p"), ["--num_processes"]),
        (("launch", "--num-p"), ["--num-processes"]),
        (("launch", "--mixed-precision", ""), ["no", "fp16", "bf16", "fp8"]),
        (("launch", "--mixed_precision", "BF"), ["bf16"]),
        (("launch", "--mixed_precision=f"), ["--mixed_precision=fp16", "--mixed_precision=fp8"]),
        (("launch", "--fsdp_offload_params", "t"), ["true"]),
        (("launch", "--fsdp_offload_params", "tra"), None),
        (("launch", "--fsdp_offload_params", "--num_proc"), ["--num_processes"]),
        (("launch", "--fsdp_offload_params", "false", "--num_proc"), ["--num_processes"]),
        (("launch", "--fsdp_reshard_after_forward", "s"), ["SHARD_GRAD_OP"]),
        (("launch", "--no-use_f"), ["--no-use_fsdp"]),
        (("launch", "--no-num"), []),
        (("launch", "--cpu", "--debug", "--num_proc"), ["--num_processes"]),
        (("launch", "--num_processes", "2", "--num_proc"), ["--num_processes"]),
        (("launch", "--help", "fs"), ["fsdp"]),
        (("launch", "-h", "me"), ["megatron_lm"]),
        (("launch", "--config_file", "f"), None),
        (("launch", "--log_dir", "f"), None),
        (("launch", "--cpu", "tr"), None),
        (("launch", "--cpu", "train.py", "--nu"), None),
        (("launch", "--", "--nu"), None),
        (("config", "validate", "f"), None),
    ],
)  # fmt: skip
def test_what_can_follow(line, expected):
    assert words(*line) == expected


def test_only_flags_that_can_be_denied_are_offered_with_no():
    for item in complete_flags([], "--no-", {}):
        if item.value == "--no-python":
            continue  # a flag whose own name begins so
        name = item.value.removeprefix("--no-").replace("-", "_")
        known = schema_of(complete_root())
        assert name in known.switches or "Bool" in type(known.by_flag[name].option_type).__name__


@pytest.mark.parametrize(
    ("shell", "environ", "printed"),
    [
        ("bash", {"COMP_WORDS": "accel\nlaunch\n--num_p", "COMP_CWORD": "2"}, "--num_processes\n"),
        ("bash", {"COMP_WORDS": "accel launch --num_p", "COMP_CWORD": "2"}, "--num_processes\n"),
        ("bash", {"COMP_WORDS": "accel\nlaunch\n--mixed_precision\n=\nb", "COMP_CWORD": "4"}, "bf16\n"),
        ("bash", {"COMP_WORDS": "accel\nlaunch\n--mixed_precision\n=", "COMP_CWORD": "3"},
         "no\nfp16\nbf16\nfp8\n"),
        ("bash", {"COMP_WORDS": "accel\nlaunch\n", "COMP_CWORD": "2"}, ""),
        ("fish", {"_TYPER_COMPLETE_ARGS": "accel conf", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
         f"config\t{COMMANDS['config'].summary}\n"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "accel launch --mixed_precision b"},
         "local -a found; found=(bf16); _describe accel found\n"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "accel launch 'my scr"}, "_files\n"),
    ],
)  # fmt: skip
def test_answers_are_in_the_form_of_the_shell(shell, environ, printed, capsys):
    assert answer({"_ACCEL_COMPLETE": f"complete_{shell}", **environ}) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("line", "code"), [("accel conf", 0), ("accel launch x.", 1)])
def test_fish_is_told_whether_there_are_words(line, code):
    environ = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "is-args"}
    assert answer({"_ACCEL_COMPLETE": "complete_fish", **environ}) == code


def test_other_requests_have_no_answer(capsys):
    for request in ("source_bash", "complete_powershell"):
        assert answer({"_ACCEL_COMPLETE": request}) == 1
    assert capsys.readouterr().out == ""


def test_flags_are_completed_without_typer_rich_or_torch():
    code = (
        "import sys; from accel_cli.completion import answer\n"
        "answer({'_ACCEL_COMPLETE': 'complete_bash', 'COMP_WORDS': 'accel launch --nu', 'COMP_CWORD': '2'})\n"
        "print([name for name in ('typer', 'rich', 'torch', 'yaml', 'pydantic') if name in sys.modules])"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert "--num_processes" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def every_command():
    """The words of each command, and the command."""

    def below(name, command, context):
        yield name, command, context
        if hasattr(command, "list_commands"):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                yield from below((*name, inner), found, typer.Context(found, info_name=inner))

    root = typer.main.get_command(app)
    yield from below((), root, typer.Context(root))


@pytest.mark.parametrize("command", [" ".join(name) for name, _, _ in every_command() if name])
def test_every_option_of_every_command_is_answered(command):
    """Choices where there are some, None where a file belongs, nothing for numbers; never an error."""
    name = tuple(command.split())
    found, context = next((each, context) for words, each, context in every_command() if words == name)
    flags = [item.value for item in complete(name, "--")]
    assert "--help" in flags
    for param in found.get_params(context):
        if param.param_type_name != "option" or param.is_flag:
            continue
        flag = param.opts[0]
        assert flag in flags
        answered = complete((*name, flag), "")
        assert answered is None or all(item.value for item in answered)
        if any(part in flag for part in ("file", "dir", "path", "output")):
            assert answered is None, flag
    for flag in getattr(found, "own", ()):
        assert flag.partition(" ")[0] in flags, flag


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("plan", "model", "--optimizer", ""), ["adamw", "muon", "sgd", "adafactor", "8bit"]),
        (("plan", "model", "--device", "h100"), ["h100-80gb"]),
        (("plan", "model", "--batch_size", ""), []),
        (("plan", "mod"), None),
        (("plan", "model", "--write", ""), None),
        (("config", "--config_file", ""), None),
        (("config", "--config_file", "run.yaml", "va"), ["validate"]),
        (("estimate-memory", "model", "--library_name", "t"), ["transformers", "timm"]),
        (("config", "get", "fsdp_config.fsdp_vers"), ["fsdp_config.fsdp_version"]),
        (("config", "get", "--config_file", "run.yaml", "compute_env"), ["compute_environment"]),
        (("config", "set", "fsdp_config.fsdp_offload_params", ""), ["true", "false"]),
        (("config", "set", "num_processes", ""), []),
        (("config", "set", "no_such_key", ""), []),
        (("config", "set", "num_processes", "2", ""), []),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("runs", ""), None),
        (("migrate", "a.py", "b"), None),
        (("launch", "--nproc_per_node", ""), ["gpu", "cpu", "auto"]),
        (("launch", "--num_processes", ""), []),
        (("launch", "--log_dir", ""), None),
        (("doctor", "--checkpoint_dir", ".", "--num_proc"), ["--num_processes"]),
        (("rehearse", "--rank"), ["--rank", "--ranks"]),
        (("test", "--js"), ["--json"]),
    ],
)
def test_values_and_arguments(line, expected):
    assert words(*line) == expected
