"""``accel launch``: start a script on one or many processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from accel_cli.dialect import App
from accel_cli.schema_command import SchemaCommand
from accel_state.config.flags import ParsedFlags, parse_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.engines import check_available, unused_options
from accel_state.launching.target import Target

__all__ = ["app", "main"]

_OWN = {"config_file": True, "help": False, "-h": False, "help-all": False}
"""Flags that are not part of the schema, and whether they take a value."""
_FOR_SEVERAL_MACHINES = ("same_network", "rdzv_backend", "rdzv_conf")


class LaunchCommand(SchemaCommand):
    """The command of ``accel launch``."""

    own_flags = {
        "--config_file": "Configuration file to read.",
        "--help": "Show help; a topic may follow.",
        "--help-all": "Show all flags.",
    }


app = App()


@app.command(cls=LaunchCommand)
def launch_script(context: typer.Context) -> int:
    """Start a script on one or many processes."""
    return main(context.args)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: flags, then the script and the script's arguments.

    Returns:
        The exit code.

    Raises:
        AccelError: the flags, the configuration file, the script or the machine are unsuitable.
    """
    flags = parse_flags(arguments, _OWN)
    if not {"help", "-h", "help_all"}.isdisjoint(flags.others):
        from accel_cli.launch_help import launch_help

        topic = flags.rest[0] if flags.rest and not Path(flags.rest[0]).exists() else ""
        sys.stdout.write(launch_help("all" if "help_all" in flags.others else topic))
        return 0
    if not flags.rest:
        raise ConfigError(
            "there is no script to launch; example: accel launch --num_processes 2 train.py --lr 0.1 "
            "(accel launch --help lists the flags)"
        )
    from accel_state.launching.run import launch

    environ = snapshot()
    resolved = resolve(flags.others.get("config_file"), environ, flags)
    config = check_available(resolved)
    target = _target(config, flags)
    if not config.quiet:
        for note in (*resolved.notes, *unused_options(resolved), *_idle(config, flags)):
            sys.stderr.write(f"accel: {note}\n")
    return launch(config, target, environ, sources=resolved.sources)


def _idle(config: LaunchConfig, flags: ParsedFlags) -> list[str]:
    """Notes about flags that have no effect on this run."""
    if config.num_machines > 1:
        return []
    typed = (flags.spelled.get(path) for path in _FOR_SEVERAL_MACHINES)
    return [f"{flag} has no effect on one machine" for flag in typed if flag is not None]


def _target(config: LaunchConfig, flags: ParsedFlags) -> Target:
    kind: Literal["script", "module", "program"] = "script"
    if config.module:
        kind = "module"
    elif config.no_python:
        kind = "program"
    return Target(flags.rest[0], flags.rest[1:], kind)
