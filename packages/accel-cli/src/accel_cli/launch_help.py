"""The help of ``accel launch``, generated from the configuration schema."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import Bool
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import BoundOption, schema_of
from accel_state.config.sections.common import CommonOptions
from accel_state.config.sections.hardware import HardwareOptions
from accel_state.config.sections.run import RunOptions
from accel_state.launching.engines import MISSING_SECTIONS, MISSING_TYPES

__all__ = ["launch_help"]

_INDENT = 30
_LATER = " (not available yet)"
_INTRODUCTION = """\
usage: accel launch [flags] script.py [the script's own arguments]

Start a script on one or many processes. Flags come before the script; everything after it is passed to
the script. In flags, dashes and underscores are equivalent. A flag takes precedence over its environment
variable, which takes precedence over the configuration file.

examples:
  accel launch train.py                                 all accelerators of this machine, or its CPU
  accel launch --num_processes 4 train.py --lr 0.1      four processes
  accel launch --cpu --num_processes 2 train.py         two processes on the CPU
  accel launch --mixed_precision bf16 -m project.train  a module instead of a file
  accel launch --dry-run --num_processes 2 train.py     show what would be run
"""


def launch_help(width: int | None = None) -> str:
    """All flags by topic.

    Args:
        width: characters per line; by default the width of the terminal, at most 120.
    """
    width = min(120, shutil.get_terminal_size((100, 24)).columns) if width is None else width
    blocks = [_INTRODUCTION]
    for title, rows in sorted(_topics(), key=lambda topic: topic[0].endswith(_LATER)):
        heading = f"\033[1m{title}\033[0m" if sys.stdout.isatty() else title
        blocks.append(f"{heading}:\n" + "".join(_row(flags, text, width) for flags, text in rows))
    return "\n".join(blocks)


def _topics() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    known = schema_of(LaunchConfig)
    general = [("-h, --help", "Show this help."), ("--config_file FILE", "Configuration file to read.")]
    root = [bound for bound in known.options if not bound.section and bound.flags]
    started = [bound for bound in root if bound.attribute in RunOptions.__annotations__]
    yield "Starting and supervising", general + [_described(bound) for bound in started]
    where = {**CommonOptions.__annotations__, **HardwareOptions.__annotations__}
    switches = [
        (flag, f"The same as --distributed_type {value}.{_later(value)}")
        for bound in root
        for flag, (value, _) in bound.about.switches.items()
    ]
    yield (
        "Processes and devices",
        [_described(bound) for bound in root if bound.attribute in where] + switches,
    )
    for name, section in known.sections.items():
        rows = [_described(bound) for bound in known.options if bound.section == name and bound.flags]
        if rows:
            later = _LATER if name in MISSING_SECTIONS else ""
            yield f"{section.title}{later}", rows
    cloud = [bound for bound in schema_of(SageMakerConfig).options if bound.flags and _is_new(bound)]
    yield f"SageMaker{_LATER}", [_described(bound) for bound in cloud]


def _is_new(bound: BoundOption) -> bool:
    return bound.flags[0].lstrip("-") not in schema_of(LaunchConfig).by_flag


def _later(kind: str) -> str:
    return " Not available yet." if kind in MISSING_TYPES else ""


def _described(bound: BoundOption) -> tuple[str, str]:
    about = bound.about
    value = "" if isinstance(bound.option_type, Bool) and about.toggle else f" {_placeholder(bound)}"
    notes = [about.help]
    if about.choices:
        notes.append(f"One of {', '.join(about.choices)}.")
    if bound.default not in (None, False, ()):
        notes.append(f"Default: {bound.option_type.format(bound.default)}.")
    if bound.variables:
        notes.append(f"[{', '.join(bound.variables)}]")
    return ", ".join(bound.flags) + value, " ".join(notes)


def _placeholder(bound: BoundOption) -> str:
    return {"Int": "N", "Float": "X", "Bool": "true|false", "BoolOrName": "true|false|NAME"}.get(
        type(bound.option_type).__name__, "TEXT"
    )


def _row(flags: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, max(30, width - _INDENT))
    first = f"  {flags}"
    if len(first) < _INDENT - 1:
        first = first.ljust(_INDENT) + lines.pop(0)
    return "\n".join([first, *(" " * _INDENT + line for line in lines)]) + "\n"
