"""The help of ``accel launch``, generated from the configuration schema: one screen, one topic, or everything."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from accel_cli.help_pages import Section, help_page, placeholder
from accel_cli.launch_topics import OWN, TOPICS
from accel_state.config.option_types import Bool
from accel_state.config.roots import complete_root
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import BoundOption, schema_of
from accel_state.config.sections.run import RunOptions
from accel_state.config.strategies import installed_strategies
from accel_state.errors import ConfigError
from accel_state.messages import did_you_mean

__all__ = ["COMMON", "TOPICS", "launch_help"]

_USAGE = ("accel launch", "[flags] script.py [the script's own arguments]")
_INTRODUCTION = """\
Start a script on one or many processes. Flags come before the script; everything after it is passed to the script. \
In flags, dashes and underscores are equivalent. A flag takes precedence over its environment variable, which takes \
precedence over the configuration file.
"""
_EXAMPLES = """\
  accel launch train.py                             all accelerators
  accel launch --num_processes 4 train.py --lr 0.1  four processes
  accel launch --cpu --num_processes 2 train.py     two on the CPU
  accel launch --use_fsdp --mixed_precision bf16 -m project.train
"""

_NUMBERED = ", or its number from 1"
_SELECTED_BY = {
    "fsdp": "Used with --use_fsdp, or distributed_type: FSDP in a file. Options of FSDP version 1 are accepted, and "
    "translated; --help-all lists them.",
    "deepspeed": "Used with --use_deepspeed, or distributed_type: DEEPSPEED in a file.",
    "parallelism": "Used with --use_parallelism_config, or a parallelism_config in a file.",
    "fp8": "Used with --mixed_precision fp8, or mixed_precision: fp8 in a file.",
    "dynamo": "Used with a --dynamo_backend other than no.",
    "tpu": "Used with --tpu, or distributed_type: XLA in a file.",
    **{each.section_name: f"Used with {each.selected_by}." for each in installed_strategies()},
}

_OF_FSDP_1 = ("fsdp.fsdp_version", "fsdp.sharding_strategy", "fsdp.backward_prefetch", "fsdp.use_orig_params",
              "fsdp.sync_module_states")  # fmt: skip
COMMON = (
    "num_processes", "use_cpu", "gpu_ids", "mixed_precision", "gradient_accumulation.num_steps", "dynamo.backend",
    "num_machines", "machine_rank", "main_process_ip", "main_process_port", "module", "log_dir", "max_restarts",
    "resume", "dry_run", "quiet",
)  # fmt: skip
"""Paths of the options on the first screen."""


def launch_help(topic: str = "", *, width: int | None = None) -> str:
    """A help page.

    Args:
        topic: a name in ``TOPICS``; ``all`` for every flag; empty for the flags that most people need.
        width: characters per line; by default the width of the terminal, at most 120.

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
        by_path = schema_of(complete_root()).by_path
        rows = [
            ("--config_file FILE", OWN["--config_file FILE"]),
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
        return help_page(*_USAGE, f"{_INTRODUCTION}\n{_EXAMPLES}", sections, width=width)
    wanted = TOPICS if topic == "all" else [topic]
    sections = [(_title(name), list(_rows(name, () if topic == "all" else _OF_FSDP_1))) for name in wanted]
    described = _INTRODUCTION if topic == "all" else _SELECTED_BY.get(topic, "")
    return help_page(
        *_USAGE, described, [found for found in sections if found[1]],
        epilog="In [brackets]: the environment variable, in upper case, and the key in a configuration file. Choices "
        "are read in any case.",
        width=width,
    )  # fmt: skip


def _options(topic: str, without: Collection[str]) -> Iterator[BoundOption]:
    known = schema_of(complete_root())
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
        if bound.flags and place == topic and bound.path not in without:
            yield bound


def _rows(topic: str, without: Collection[str]) -> Iterator[tuple[str, str]]:
    if topic == "run":
        yield from (("-h, --help [TOPIC]" if flag == "--help" else flag, text) for flag, text in OWN.items())
    for bound in _options(topic, without):
        yield _described(bound)
        for switch, (value, variable) in bound.about.switches.items():
            shown = f" [{variable}]" if variable else ""
            yield switch, f"The same as {bound.flags[0]} {value}.{shown}"


def _title(topic: str) -> str:
    if topic in schema_of(complete_root()).sections:
        title = schema_of(complete_root()).sections[topic].title
    else:
        title = {
            "run": "Starting and supervising",
            "devices": "Processes and devices",
            "sagemaker": "SageMaker",
        }[topic]
    return f"{title} (--help {topic})"


def _short(bound: BoundOption) -> tuple[str, str]:
    choices = f" One of {', '.join(bound.choices)}." if 0 < len(bound.choices) < 6 else ""
    return _names(bound, aliases=False), bound.about.help + choices


def _described(bound: BoundOption) -> tuple[str, str]:
    about = bound.about
    notes = [about.help]
    if bound.listed:
        words = [f"{name} ({meaning})" for name, meaning in about.synonyms.items()]
        notes.append(f"One of {', '.join([*bound.listed, *words])}{_NUMBERED if about.numbered else ''}.")
    default = about.launch_default if bound.default is None else bound.default
    toggle = isinstance(bound.option_type, Bool) and about.toggle
    if default not in (None, ()) and not (toggle and default is False):
        notes.append(f"Default: {bound.option_type.format(default)}.")
    carriers = [*bound.variables, *([bound.file_path] if bound.keys else [])]
    if carriers:
        notes.append(f"[{', '.join(carriers)}]")
    return _names(bound), " ".join(notes)


def _names(bound: BoundOption, *, aliases: bool = True) -> str:
    value = ""
    if not (isinstance(bound.option_type, Bool) and bound.about.toggle):
        value = f" {placeholder(type(bound.option_type).__name__, bound.path, bool(bound.about.choices))}"
    short = [flag for flag in bound.flags[1:] if aliases or not flag.startswith("--")]
    return ", ".join([bound.flags[0], *short]) + value
