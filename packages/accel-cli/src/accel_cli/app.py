"""The ``accel`` application: the table of commands, their lazy import, and the messages of their errors.

A command's module is imported when the command runs or shows its help, so that ``accel --help`` and completion are
fast.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from accel_cli.__about__ import __version__
from accel_cli.dialect import CONTEXT, App, CommandGroup, UsageError, describe_usage_error
from accel_cli.help_pages import show_error, write_rows
from accel_state.messages import did_you_mean, say
from accel_state.registry import Registry

__all__ = ["COMMANDS", "OTHER_NAMES", "known_commands", "main"]


class Entry(NamedTuple):
    """An entry of the table.

    Attributes:
        topic: heading in ``accel --help``.
        summary: one line for ``accel --help``.
    """

    topic: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "config": Entry("start", "Write, show, change and check the file that launch reads."),
    "launch": Entry("start", "Start a script on one or many processes."),
    "rehearse": Entry(
        "plan", "Simulate one rank of a larger run on this machine, and report what would fail."
    ),
    "prove": Entry(
        "plan", "Compare a script's first steps on two processes with those on one, and name what differs."
    ),
    "plan": Entry("plan", "Show which strategies fit a model into the memory of devices."),
    "estimate-memory": Entry("plan", "Estimate the memory to load, train and run a model."),
    "doctor": Entry("look", "Find what would stop or slow a training run: machine, network, ranks."),
    "test": Entry("look", "Check the configured world: collectives, data, training, saving."),
    "env": Entry("look", "Show versions, devices and the configuration, for bug reports."),
    "jobs": Entry("look", "List jobs that launch --submit has started, show their output, cancel them."),
    "runs": Entry("look", "List the runs in a folder of logs: state, checkpoint, last lines."),
    "checkpoint": Entry("look", "List, show, verify, compare and remove checkpoints."),
    "completion": Entry("look", "Print the script that completes accel in a shell."),
    "migrate": Entry("convert", "Rewrite the imports and commands of Accelerate's scripts for this library."),
    "to-fsdp2": Entry("convert", "Convert a configuration file from FSDP version 1 to 2."),
    "merge-weights": Entry("convert", "Merge a sharded checkpoint into plain files of weights."),
    "tpu-config": Entry("pods", "Run commands on all machines of a TPU pod."),
}
"""Every command, by its name, after which its module is named; that has an ``App`` named ``app``."""

_REGISTRY: Registry[Any] = Registry(
    "command",
    "accel_cli.commands",
    {name: f"accel_cli.commands.{name.replace('-', '_')}:app" for name in COMMANDS},
    base=typer.Typer,
)
"""The commands of the table, and those that installed packages add by an entry point, which names an ``App``."""

_OTHERS = {
    "test": "check sanity-check selftest",
    "doctor": "diagnose ds-report",
    "launch": "run torchrun start",
    "config": "configure init setup",
    "rehearse": "simulate",
    "env": "info collect-env",
    "runs": "history logs status",
    "checkpoint": "checkpoints ckpt ckpts prune",
    "--version": "version",
    "merge-weights": "consolidate merge zero-to-fp32",
    "to-fsdp2": "fsdp2",
    "tpu-config": "tpu",
    "estimate-memory": "estimate memory",
}
OTHER_NAMES = {other: name for name, others in _OTHERS.items() for other in others.split()}
"""Names of other tools' commands, with the equivalent command of ours."""

_USAGE = 2
_FAILURE = 1
_CUT_OFF = 141
"""128 + SIGPIPE, as shells report for programs whose reader closed the pipe."""


class LazyGroup(CommandGroup):
    """The commands of the table; each module is imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(known_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command with this name; None if there is none."""
        registered = _registered(cmd_name)
        if registered is None:
            return None
        command = typer.main.get_command(_REGISTRY.get(registered))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the tables of commands, one for each topic."""
        commands = known_commands()
        for topic in dict.fromkeys(entry.topic for entry in commands.values()):
            rows = [(name, entry.summary) for name, entry in commands.items() if entry.topic == topic]
            write_rows(formatter, topic, rows)
        for sentence in _REGISTRY.hidden():
            say(f"accel: {sentence}")


def _registered(name: str) -> str | None:
    """The name under which a command is in the registry; None: there is no such command."""
    if name in COMMANDS:
        return name
    return next((each for each in _REGISTRY.installed() if each.replace("_", "-") == name), None)


def known_commands() -> dict[str, Entry]:
    """All commands; of those of installed packages nothing is imported, so only their packages are known."""
    installed = {
        name: Entry("installed", f"Of the installed package {re.split('[.:]', place)[0]}.")
        for name, place in sorted(_REGISTRY.installed().items())
    }
    return COMMANDS | installed


app = App(cls=LazyGroup, help="Configure, launch and inspect PyTorch training.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"accel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accel``.

    Args:
        arguments: the arguments after ``accel``; by default those of this process.

    Returns:
        The exit code: 0; 1 for a failure; 2 for a wrong command line or configuration; 128 + n after
        signal n; for ``launch``, that of the rank that failed first.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the descriptor closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (accel launch --help | head). The rest would be written again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_OFF
    return code


def _main(words: list[str]) -> int:
    root: Any = typer.main.get_command(app)
    if not words:
        return _main(["--help"]) or _FAILURE
    if words[0] == "help":
        words = [*words[1:], "--help"]
    name = words[0].replace("_", "-")
    exists = not name.startswith("-") and _registered(name) is not None
    if not exists and not name.startswith("-"):
        return _complain("accel", _unknown(words[0]), _USAGE)
    who = f"accel {name}" if exists else "accel"
    from accel_state.errors import AccelError

    try:
        if exists:
            # Without the root's own options, which Typer converts with pydantic: 50 ms and 14 MB in every launcher.
            top = typer.Context(root, info_name="accel", **CONTEXT)
            command = root.get_command(top, name)
            with command.make_context(name, words[1:], parent=top) as context:
                code = command.invoke(context)
        else:
            with root.make_context("accel", words) as context:
                code = root.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UsageError as error:
        path = getattr(getattr(error, "ctx", None), "command_path", who)
        return _complain(path, describe_usage_error(error), _USAGE)
    except AccelError as error:
        return _complain(who, str(error), error.exit_code)
    return code if type(code) is int else 0


def _unknown(name: str) -> str:
    """The error about a command, with a hint for names of other tools and for scripts."""
    other = OTHER_NAMES.get(name.replace("_", "-"))
    if name.endswith(".py"):
        hint = f"; to start a script: accel launch {name}"
    elif other is not None:
        hint = f"; use accel {other}"
    else:
        hint = did_you_mean(name, known_commands(), f"; the commands are {', '.join(known_commands())}")
    return f"command {name} does not exist{hint}"


def _complain(who: str, message: str, code: int) -> int:
    sys.stdout.flush()
    show_error(who, message)
    return code
