"""``accel launch``: start a script on one or many processes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from accel_cli.dialect import App, Command
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


class LaunchCommand(Command):
    """The command whose flags are those of the schema: ``parse_flags`` reads them, as a file and variables are read."""

    def get_params(self, ctx: Any) -> list[Any]:
        """One parameter per flag of the schema, for completion."""
        return list(_completed().params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words for ``main``."""
        ctx.args = list(args)
        return args

    def invoke(self, ctx: Any) -> int:
        """Run ``main``."""
        return main(ctx.args)


app = App()


@app.command(cls=LaunchCommand)
def launch_script() -> None:
    """Start a script on one or many processes."""


def _completed() -> Any:
    """A command with a Typer option for every flag of the schema, and the script as a path."""
    from accel_cli.launch_help import typed_flags

    def nothing(**values: Any) -> None:
        pass

    parameters = [
        inspect.Parameter(
            f"flag_{index}",
            inspect.Parameter.KEYWORD_ONLY,
            default=False if toggle else None,
            annotation=Annotated[
                bool if toggle else str | None,
                typer.Option(*names, help=text, autocompletion=_choices(choices) if choices else None),
            ],
        )
        for index, (names, text, toggle, choices) in enumerate(typed_flags())
    ]
    script = inspect.Parameter(
        "script",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[list[Path] | None, typer.Argument()],
        default=None,
    )
    nothing.__signature__ = inspect.Signature([*parameters, script])  # type: ignore[attr-defined]
    completed = App()
    completed.command()(nothing)
    return typer.main.get_command(completed)


def _choices(choices: Sequence[str]) -> Any:
    def begin(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.lower().startswith(incomplete.lower())]

    return begin


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
    if resolved.config.compute_environment == "AMAZON_SAGEMAKER":
        from accel_cli.sagemaker_launch import launch_on_sagemaker

        return launch_on_sagemaker(resolved, Target(flags.rest[0], flags.rest[1:]))
    config = check_available(resolved)
    target = _target(config, flags)
    if config.use_tpu:
        from accel_cli.tpu_launch import launch_on_pod, on_tpu

        if config.tpu.tpu_use_cluster:
            return launch_on_pod(config, target, environ)
        config, target = on_tpu(resolved, config, target, environ)
    if not config.quiet:
        for note in (*resolved.notes, *unused_options(resolved), *_idle(config, flags)):
            sys.stderr.write(f"accel: {note}\n")
    return launch(config, target, environ)


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
