"""``accel launch``: start a script on one or many processes."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import typer

from accel_cli.dialect import App
from accel_cli.launch_topics import OWN
from accel_cli.misplaced_flags import ask_to_move, find_misplaced, moved, notes_on
from accel_cli.schema_command import SchemaCommand
from accel_state.config.flags import ParsedFlags, without_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import Resolved, resolve
from accel_state.config.unknown_variables import misspelt_variables
from accel_state.constants import NAMES_TOLD
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.deepspeed_file import check_deepspeed_file
from accel_state.launching.engines import check_available, check_installed, unused_options
from accel_state.launching.target import Target
from accel_state.messages import folded, say

__all__ = ["LaunchCommand", "app", "main", "target_of"]

_FOR_SEVERAL_MACHINES = (
    "same_network", "rdzv_backend", "rdzv_conf", "rdzv_id", "min_machines", "connect_timeout",
)  # fmt: skip


class LaunchCommand(SchemaCommand):
    """The command of ``accel launch``."""

    own = OWN

    def help_for(self, ctx: Any, flags: ParsedFlags) -> str:
        """The page of the flags that most people need, of a topic, or of all flags."""
        from accel_cli.launch_help import launch_help

        topic = flags.rest[0] if flags.rest and not Path(flags.rest[0]).exists() else ""
        return launch_help("all" if "help_all" in flags.others else topic).rstrip("\n")


app = App()


@app.command(cls=LaunchCommand)
def launch_script(context: typer.Context) -> int:
    """Start a script on one or many processes."""
    return main(context.args)


def main(arguments: Sequence[str], *, returns: bool = False) -> int:
    """Run the command.

    Args:
        arguments: flags, then the script and the script's arguments.
        returns: always return; else a single process may replace this one.

    Returns:
        The exit code.

    Raises:
        AccelError: the flags, the configuration file, the script or the machine are unsuitable.
    """
    flags = LaunchCommand.read(arguments)
    if not flags.rest:
        raise ConfigError(
            "there is no script to launch; example: accel launch --num_processes 2 train.py --lr 0.1 "
            "(accel launch --help lists the flags)"
        )
    from accel_state.launching.run import launch
    from accel_state.launching.surroundings import find_surroundings

    environ = snapshot()
    misplaced = find_misplaced(arguments, flags)
    if misplaced and not returns and ask_to_move(misplaced, flags.rest[0]):
        arguments = moved(arguments, flags, misplaced)
        flags, misplaced = LaunchCommand.read(arguments), []
    if "as_accelerate" in flags.others:
        from accel_cli.alias_folders import environment

        environ = environment(environ)
    resolved = resolve(flags.others.get("config_file"), environ, flags)
    if resolved.config.compute_environment == "AMAZON_SAGEMAKER":
        from accel_cli.sagemaker_launch import launch_on_sagemaker

        return launch_on_sagemaker(resolved, Target(flags.rest[0], flags.rest[1:]))
    check_available(resolved)
    resolved = check_deepspeed_file(resolved)
    surroundings = find_surroundings(resolved, environ)
    resolved = surroundings.resolved
    config = resolved.local()
    target = target_of(config, flags)
    runs_here = config.submit is None and not config.tpu.tpu_use_cluster
    if runs_here and not config.dry_run and target.kind != "program":
        check_installed(resolved)
    if config.use_tpu:
        from accel_cli.tpu_launch import launch_on_pod, on_tpu

        if config.tpu.tpu_use_cluster:
            return launch_on_pod(config, target, environ)
        config, target = on_tpu(resolved, config, target, environ)
    misspelt = misspelt_variables(environ)
    if misspelt:  # ranks would say it again
        environ = {**environ, NAMES_TOLD: "1"}
    if not config.quiet:
        told = (*misspelt, *resolved.notes, *surroundings.notes, *unused_options(resolved))
        for note in (*told, *notes_on(misplaced, flags.rest[0]), *_idle(config, flags)):
            say(f"accel: {note}")
    if config.debug:
        _tell_origins(resolved)
    if config.submit is not None:
        return _submit(config, arguments, target, environ)
    return launch(
        config, target, environ, joins=surroundings.joins, sources=resolved.sources, returns=returns
    )


def _tell_origins(resolved: Resolved) -> None:
    """Print each value that is not a default, and where it comes from."""
    from accel_cli.config_show import effective_options

    for option in effective_options(resolved):
        if option.source.origin:
            say(f"accel: {option.name} is {option.value}, from {option.source}")


def _submit(
    config: LaunchConfig, arguments: Sequence[str], target: Target, environ: Mapping[str, str]
) -> int:
    """Submit the run as a job; the job runs this command again, without the flags of the submission."""
    from accel_state.launching.submission import SUBMISSIONS, Job
    from accel_state.launching.target import check_target

    submission = SUBMISSIONS.get(str(config.submit))
    if not submission.has_own_files:
        check_target(target, environ)
    kept = without_flags(
        arguments,
        LaunchCommand.taking(),
        lambda name: name in ("submit", "dry_run") or name.startswith("submit_"),
    )
    command = (sys.executable, "-m", "accel_cli", "launch", *kept)
    job = Job(config, command, target.name, tuple(target.args), secrets.token_hex(3))
    if config.dry_run:
        sys.stdout.write(submission.script(job))  # as it is submitted: secrets were refused
    else:
        sys.stdout.write(folded(f"accel: {submission.submit(job, environ)}\n", sys.stdout))
    return 0


def _idle(config: LaunchConfig, flags: ParsedFlags) -> list[str]:
    """Notes about flags that have no effect on this run."""
    if config.num_machines > 1:
        return []
    typed = (flags.spelled.get(path) for path in _FOR_SEVERAL_MACHINES)
    return [f"{flag} has no effect on one machine" for flag in typed if flag is not None]


def target_of(config: LaunchConfig, flags: ParsedFlags) -> Target:
    """The target that the words after the flags name: a script, a module or a program."""
    kind: Literal["script", "module", "program"] = "script"
    if config.module:
        kind = "module"
    elif config.no_python:
        kind = "program"
    return Target(flags.rest[0], flags.rest[1:], kind)
