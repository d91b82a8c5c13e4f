"""The help of ``accel launch``, generated from the configuration schema: one screen, one topic, or everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from accel_cli.colors import Colors
from accel_cli.dialect import did_you_mean
from accel_cli.help_pages import Section, help_page
from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import Bool, BoolOrName
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import BoundOption, schema_of
from accel_state.config.sections.run import RunOptions
from accel_state.errors import ConfigError
from accel_state.launching.engines import MISSING_SECTIONS, MISSING_TYPES

__all__ = ["COMMON", "TOPICS", "TypedFlag", "launch_help", "typed_flags"]

_LATER = "not available yet"
_USAGE = "accel launch [flags] script.py [the script's own arguments]"
_INTRODUCTION = """\
Start a script on one or many processes. Flags come before the script; everything after it is passed to the script. \
In flags, dashes and underscores are equivalent. A flag takes precedence over its environment variable, which takes \
precedence over the configuration file.
"""
_EXAMPLES = """\
  accel launch train.py                                 all accelerators of this machine, or its CPU
  accel launch --num_processes 4 train.py --lr 0.1      four processes
  accel launch --cpu --num_processes 2 train.py         two processes on the CPU
  accel launch --use_fsdp --mixed_precision bf16 -m project.train
"""

COMMON = (
    "num_processes", "use_cpu", "gpu_ids", "mixed_precision", "gradient_accumulation.num_steps", "dynamo.backend",
    "num_machines", "machine_rank", "main_process_ip", "main_process_port", "module", "log_dir", "max_restarts",
    "resume", "dry_run", "quiet",
)  # fmt: skip
"""Paths of the options on the first screen."""

TOPICS = {
    "run": "starting, supervising, restarting, logs",
    "devices": "processes, machines, devices",
    "gradient_accumulation": "gradient accumulation",
    "dynamo": "torch.compile",
    "fsdp": "fully sharded data parallelism",
    "deepspeed": "DeepSpeed",
    "megatron_lm": "Megatron-LM",
    "parallelism": "tensor, context and sequence parallelism",
    "fp8": "fp8",
    "mpirun": "MPI",
    "tpu": "TPUs",
    "sagemaker": "Amazon SageMaker",
}
"""Names for ``accel launch --help TOPIC``, and what they are about."""


class TypedFlag(NamedTuple):
    """A flag as completion needs it.

    Attributes:
        names: all spellings, with their dashes.
        help: one sentence.
        toggle: it takes no value.
        choices: the values that it takes; empty: any.
    """

    names: tuple[str, ...]
    help: str
    toggle: bool
    choices: tuple[str, ...]


def launch_help(topic: str = "", *, width: int | None = None, colors: Colors | None = None) -> str:
    """A help page.

    Args:
        topic: a name in ``TOPICS``; ``all`` for every flag; empty for the flags that most people need.
        width: characters per line; by default the width of the terminal, at most 120.
        colors: by default those of standard output.

    Raises:
        ConfigError: there is no such topic.
    """
    topic = topic.lower().replace("-", "_").removesuffix("_config")
    if topic not in ("", "all") and topic not in TOPICS:
        raise ConfigError(
            f"there is no help about {topic}"
            + did_you_mean(topic, TOPICS, f"; the topics are {', '.join(TOPICS)}")
        )
    if not topic:
        by_path = schema_of(LaunchConfig).by_path
        rows = [
            ("--config_file FILE", "Configuration file to read."),
            *(_short(by_path[path]) for path in COMMON),
        ]
        rows.insert(
            5, ("--use_fsdp, --use_deepspeed", "Divide the model over the processes; see --help fsdp.")
        )
        about = [
            ("--help-all", "All flags."),
            ("--help TOPIC", f"The flags of a topic: {', '.join(TOPICS)}."),
        ]
        sections: list[Section] = [("flags that most people need", rows), ("more", about)]
        return help_page(_USAGE, f"{_INTRODUCTION}\n{_EXAMPLES}", sections, width=width, colors=colors)
    wanted = TOPICS if topic == "all" else [topic]
    sections = [(_title(name), list(_rows(name))) for name in wanted]
    return help_page(
        _USAGE, _INTRODUCTION if topic == "all" else "", [found for found in sections if found[1]],
        epilog="In [brackets]: environment variables, and the key in a configuration file.",
        width=width, colors=colors,
    )  # fmt: skip


def typed_flags() -> Iterator[TypedFlag]:
    """Every flag of ``accel launch``, in the order of ``--help-all``."""
    yield TypedFlag(("--help",), "Show help; a topic may follow.", True, ())
    yield TypedFlag(("--help-all",), "Show all flags.", True, ())
    yield TypedFlag(("--config_file",), "Configuration file to read.", False, ())
    for topic in TOPICS:
        for bound in _options(topic):
            toggle = isinstance(bound.option_type, Bool) and bound.about.toggle
            choices = bound.about.choices
            if isinstance(bound.option_type, Bool | BoolOrName) and not toggle:
                choices = ("true", "false", *choices)
            yield TypedFlag(bound.flags, bound.about.help, toggle, choices)
    for bound in schema_of(LaunchConfig).options:
        for switch, (value, _) in bound.about.switches.items():
            yield TypedFlag((switch,), f"The same as {bound.flags[0]} {value}.", True, ())


def _options(topic: str) -> Iterator[BoundOption]:
    known = schema_of(LaunchConfig)
    if topic == "sagemaker":
        yield from (
            bound
            for bound in schema_of(SageMakerConfig).options
            if bound.flags and bound.flags[0].lstrip("-") not in known.by_flag
        )
        return
    for bound in known.options:
        started = bound.attribute in RunOptions.__annotations__
        place = bound.section or ("run" if started else "devices")
        if bound.flags and place == topic:
            yield bound


def _rows(topic: str) -> Iterator[tuple[str, str]]:
    if topic == "run":
        yield "-h, --help [TOPIC]", "Show the flags that most people need, or those of a topic."
        yield "--help-all", "Show all flags."
        yield "--config_file FILE", "Configuration file to read."
    for bound in _options(topic):
        yield _described(bound)
        for switch, (value, variable) in bound.about.switches.items():
            later = f" {_LATER.capitalize()}." if value in MISSING_TYPES else ""
            shown = f" [{variable}]" if variable else ""
            yield switch, f"The same as {bound.flags[0]} {value}.{later}{shown}"


def _title(topic: str) -> str:
    if topic in schema_of(LaunchConfig).sections:
        title = schema_of(LaunchConfig).sections[topic].title
    else:
        title = {
            "run": "Starting and supervising",
            "devices": "Processes and devices",
            "sagemaker": "SageMaker",
        }[topic]
    later = f", {_LATER}" if topic in MISSING_SECTIONS else ""
    return f"{title} (--help {topic}{later})"


def _short(bound: BoundOption) -> tuple[str, str]:
    choices = f" One of {', '.join(bound.about.choices)}." if 0 < len(bound.about.choices) < 6 else ""
    return _names(bound), bound.about.help + choices


def _described(bound: BoundOption) -> tuple[str, str]:
    about = bound.about
    notes = [about.help]
    if about.choices:
        notes.append(f"One of {', '.join(about.choices)}.")
    default = about.launch_default if bound.default is None else bound.default
    if default not in (None, False, ()):
        notes.append(f"Default: {bound.option_type.format(default)}.")
    carriers = [*bound.variables, *([bound.file_path] if bound.keys else [])]
    if carriers:
        notes.append(f"[{', '.join(carriers)}]")
    return _names(bound), " ".join(notes)


def _names(bound: BoundOption) -> str:
    value = "" if isinstance(bound.option_type, Bool) and bound.about.toggle else f" {_placeholder(bound)}"
    return ", ".join(bound.flags) + value


def _placeholder(bound: BoundOption) -> str:
    return {"Int": "N", "Float": "X", "Bool": "true|false", "BoolOrName": "true|false|NAME"}.get(
        type(bound.option_type).__name__, "TEXT"
    )
