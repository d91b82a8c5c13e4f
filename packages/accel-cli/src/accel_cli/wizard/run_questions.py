"""The questions of every local run: precision, and options that are set on request; and those of TPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from accel_cli.wizard.answers import Answers, Condition, contains, equals, negated, offered, only_if
from accel_cli.wizard.place_questions import ACCELERATORS, CPU, SAGEMAKER, TPU
from accel_cli.wizard.question import Choice, Question
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Option, Section
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError

__all__ = ["EXTRAS", "RUN_QUESTIONS", "TPU_QUESTIONS", "compile_questions", "fp8_questions"]

EXTRAS: dict[str, Condition] = {
    "gradient_accumulation.num_steps": negated(equals("deepspeed_file", True)),
    "dynamo.backend": lambda answers: True,
    "num_cpu_threads_per_process": lambda answers: True,
    "enable_cpu_affinity": equals("devices", ACCELERATORS),
    "debug": negated(equals("distributed_type", "NO")),
    "mpirun.hostfile": only_if(equals("devices", CPU), equals("distributed_type", "MULTI_CPU")),
}
"""Options that are only set on request, and when they are offered. Booleans have no further question."""

_OWN_EXTRAS = Option(
    help="Options that are not selected keep their defaults, and no key for them is written.",
    prompt="Do you want to set more options?",
)
_TPU = equals("place", TPU)
_POD = equals("tpu.tpu_use_cluster", True)
_LOCAL = negated(equals("place", SAGEMAKER))
_COMPILED = contains("extras", "dynamo.backend")


def _extras(answers: Answers) -> Sequence[Choice]:
    by_path = schema_of(LaunchConfig).by_path
    return [
        Choice(path, re.split(r"[.,;] ", by_path[path].about.help)[0].rstrip("."))
        for path, condition in EXTRAS.items()
        if condition(answers)
    ]


def _extras_before(answers: Answers) -> tuple[str, ...]:
    by_path = schema_of(LaunchConfig).by_path
    return tuple(
        path
        for path in EXTRAS
        if answers.before(path, by_path[path].default) not in (by_path[path].default, "NO")
    )


def _backends(answers: Answers) -> Sequence[Choice]:
    names = [name for name in schema_of(LaunchConfig).by_path["dynamo.backend"].about.choices if name != "NO"]
    return [Choice(name, name) for name in sorted(names, key=lambda name: name != "INDUCTOR")]


_SHAPES = (
    Choice(None, "torch.compile decides", "d"),
    Choice(True, "yes, with dynamic shapes", "y"),
    Choice(False, "no, compile again for each shape", "n"),
)

_FP8_BACKENDS = (Choice("AO", "AO: torchao"), Choice("TE", "TE: TransformerEngine, on NVIDIA GPUs only"))
_TE = (
    "use_autocast_during_eval",
    "margin",
    "interval",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
)
"""Fields of the fp8 section that TransformerEngine uses."""


def _precisions(answers: Answers) -> Sequence[Choice]:
    """The precisions that the launcher takes with the engine that was chosen."""
    names = schema_of(LaunchConfig).by_path["mixed_precision"].about.choices
    without = equals("distributed_type", "DEEPSPEED")(answers) or _TPU(answers)
    return [Choice(name, name) for name in names if not (name == "fp8" and without)]


def _threads_before(answers: Answers) -> int:
    """The number so far, or an equal share of this machine's cores."""
    share = answers.situation.machine.cores // int(answers.get("num_processes", 1))
    return int(answers.before("num_cpu_threads_per_process", max(1, share)))


def _check_variables(answers: Answers, items: Sequence[str]) -> None:
    wrong = [item for item in items if not item.partition("=")[0].isidentifier() or "=" not in item]
    if wrong:
        raise ConfigError(f"the answer has {wrong[0]!r}; expected NAME=value")


TPU_QUESTIONS = (
    Question(path="tpu.main_training_function", when=(_TPU,), required=True),
    Question(path="tpu.tpu_use_cluster", when=(_TPU, offered("tpu.tpu_use_cluster"))),
    Question(path="tpu.tpu_name", when=(_POD,)),
    Question(path="tpu.tpu_vm", when=(_POD, equals("tpu.tpu_name", None)), separator=",", required=True),
    Question(path="tpu.tpu_zone", when=(_POD,)),
    Question(path="tpu.tpu_use_sudo", when=(_POD,)),
    Question(path="tpu.command_file", when=(_POD,), file=True),
    Question(path="tpu.commands", when=(_POD, equals("tpu.command_file", None)), separator=";"),
    Question(path="tpu.tpu_env", when=(_POD,), separator=",", check=_check_variables),
)
"""The questions of TPUs."""


def _prefix(root: type[Section]) -> str:
    return "sagemaker." if root is SageMakerConfig else ""


def fp8_questions(root: type[Section]) -> tuple[Question, ...]:
    """The questions of mixed precision fp8."""
    prefix = _prefix(root)
    engine = equals(f"{prefix}fp8.backend", "TE")
    return (
        Question(
            path="fp8.backend",
            root=root,
            when=(equals(f"{prefix}mixed_precision", "fp8"),),
            choices=lambda answers: _FP8_BACKENDS,
        ),
        *(Question(path=f"fp8.{name}", root=root, when=(engine,), required=True) for name in _TE),
        *(
            Question(path=f"fp8.{name}", root=root, when=(equals(f"{prefix}fp8.backend", "AO"),))
            for name in ("enable_fsdp_float8_all_gather", "pad_inner_dim")
        ),
    )


def compile_questions(root: type[Section], asked: Condition) -> tuple[Question, ...]:
    """The questions about ``torch.compile``, after that of its backend."""
    return (
        Question(path="dynamo.mode", root=root, when=(asked,)),
        Question(path="dynamo.fullgraph", root=root, when=(asked,)),
        Question(
            path="dynamo.dynamic",
            root=root,
            when=(asked,),
            choices=lambda answers: _SHAPES,
            default=lambda answers: answers.before(f"{_prefix(root)}dynamo.dynamic"),
        ),
        Question(path="dynamo.use_regional_compilation", root=root, when=(asked,)),
    )


RUN_QUESTIONS = (
    Question(path="mixed_precision", when=(_LOCAL,), choices=_precisions),
    *fp8_questions(LaunchConfig),
    Question(path="tpu.downcast_bf16", when=(_TPU, equals("mixed_precision", "bf16"))),
    Question(
        path="extras",
        own=_OWN_EXTRAS,
        when=(_LOCAL,),
        choices=_extras,
        default=_extras_before,
        multiple=True,
    ),
    Question(
        path="gradient_accumulation.num_steps",
        when=(contains("extras", "gradient_accumulation.num_steps"),),
        default=lambda answers: answers.before("gradient_accumulation.num_steps", 1),
        required=True,
    ),
    Question(
        path="dynamo.backend",
        when=(_COMPILED,),
        choices=_backends,
        default=lambda answers: answers.before("dynamo.backend", "INDUCTOR"),
    ),
    *compile_questions(LaunchConfig, _COMPILED),
    Question(
        path="num_cpu_threads_per_process",
        when=(contains("extras", "num_cpu_threads_per_process"),),
        default=_threads_before,
        required=True,
    ),
    Question(
        path="mpirun.hostfile",
        when=(contains("extras", "mpirun.hostfile"),),
        required=True,
        file=True,
    ),
)
"""Precision, and options that are set on request."""
