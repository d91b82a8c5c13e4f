"""``accel tpu-config``: run commands on all machines of a TPU pod, to set it up."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from accel_cli.config_files import FileOption
from accel_cli.dialect import App, Command, repeated
from accel_state.config.merge import resolve
from accel_state.config.sections.tpu import TpuSection
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.installing import INSTALL
from accel_state.launching.machines.tpu_pod import run_on_pod, ssh_commands
from accel_state.messages import without_secrets
from accel_state.whole_files import read_whole

__all__ = ["app", "refuse_to_install"]


class TpuCommand(Command):
    """``--command`` takes one or more words after it, each a command, as in Accelerate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat ``--command`` before each word that follows it."""
        return super().parse_args(ctx, repeated(args, "--command", lambda word: not word.startswith("-")))


app = App()


@app.command(cls=TpuCommand)
def tpu_config(
    config_file: FileOption = None,
    tpu_name: Annotated[str | None, typer.Option("--tpu_name", help="Name of the TPU.")] = None,
    tpu_zone: Annotated[
        str | None, typer.Option("--tpu_zone", help="Zone of the TPU; by default gcloud's own.")
    ] = None,
    use_alpha: Annotated[bool, typer.Option("--use_alpha", help="Run gcloud alpha.")] = False,
    command_file: Annotated[
        Path | None, typer.Option("--command_file", help="File with shell commands to run.")
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Option("--command", help="Shell command to run, after those of the file; may be repeated."),
    ] = None,
    install_accelerate: Annotated[
        bool, typer.Option("--install_accelerate", "--install_accel", hidden=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", "--dry_run", help="Print the command; run nothing.")
    ] = False,
) -> int:
    """Run shell commands on every machine of a TPU pod, in /usr/share, through gcloud's ssh.

    Flags take precedence over tpu_name, tpu_zone, command_file and commands of the configuration file. The first
    command that fails on a machine stops the commands there (add || true to one that may fail), and the exit code is
    gcloud's.
    """
    if install_accelerate:
        refuse_to_install()
    environ = snapshot()
    tpu = resolve(config_file, environ).local().tpu
    changed: dict[str, Any] = {"tpu_vm": None}
    if tpu_name is not None:
        changed["tpu_name"] = tpu_name
    if tpu_zone is not None:
        changed["tpu_zone"] = tpu_zone
    if command_file is not None or command:
        changed |= {"command_file": command_file, "commands": tuple(command or ())}
    tpu = dataclasses.replace(tpu, **changed)
    (words,) = ssh_commands(tpu, [_script(tpu)], alpha=use_alpha)
    if debug:
        typer.echo(f"Running {shlex.join(without_secrets(words))}")
        return 0
    code = run_on_pod([words], environ)
    if code == 0:
        typer.echo(f"{tpu.tpu_name} is set up")
    return code


def refuse_to_install() -> NoReturn:
    """Raise what ``--install_accelerate`` gets.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "--install_accelerate cannot install by name: the packages are on no package index yet. Copy a clone to the "
        f"machines, and pass its command by --command ({INSTALL})"
    )


def _script(tpu: TpuSection) -> str:
    """The shell script for each machine."""
    commands = list(tpu.commands or ())
    if tpu.command_file:
        try:
            commands.insert(0, read_whole(Path(tpu.command_file).expanduser()).decode().strip("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--command_file {tpu.command_file} cannot be read: {error}") from error
    if not [text for text in commands if text.strip()]:
        raise ConfigError(
            "there is nothing to run; pass --command or --command_file, or write commands into the configuration file"
        )
    # A file may have comments and blocks over several lines, so it is not joined with semicolons.
    return "\n".join(_joined(["set -e", "cd /usr/share", *commands]))


def _joined(commands: list[str]) -> list[str]:
    """Commands of one line on one line, with semicolons; others as they are."""
    found: list[str] = []
    for text in commands:
        plain = "\n" not in text and "#" not in text
        if found and plain and not found[-1].endswith("\n"):
            found[-1] += f"; {text}"
        else:
            found.append(text if plain else f"{text}\n")
    return [text.removesuffix("\n") for text in found]
