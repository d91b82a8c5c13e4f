"""The command table, and the parts that all commands share: help, version, error messages.

This module imports very little: each command's module is imported when the command runs.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from accel_cli.__about__ import __version__

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """An entry of the table.

    Attributes:
        module: has a function ``main(arguments) -> int``.
        summary: one line for ``accel --help``.
    """

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "config": Command("accel_cli.commands.config", "Write the configuration file that launch reads."),
    "env": Command(
        "accel_cli.commands.env", "Show versions, devices and the configuration, for bug reports."
    ),
    "launch": Command("accel_cli.commands.launch", "Start a script on one or many processes."),
    "merge-weights": Command(
        "accel_cli.commands.merge_weights", "Merge a sharded checkpoint into plain files of weights."
    ),
}

_USAGE = 2
_FAILURE = 1
_CUT_OFF = 141
"""128 + SIGPIPE, as shells report for programs whose reader closed the pipe."""


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
    if not words:
        sys.stdout.write(_help())
        return _FAILURE
    name, *rest = words
    if name == "help" and rest and rest[0] in COMMANDS:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"accel {__version__}\n")
        return 0
    if name not in COMMANDS:
        return _complain("accel", _unknown(name), _USAGE)
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    from accel_state.errors import AccelError, ConfigError

    try:
        return int(importlib.import_module(COMMANDS[name].module).main(arguments))
    except ConfigError as error:
        return _complain(f"accel {name}", str(error), _USAGE)
    except AccelError as error:
        return _complain(f"accel {name}", str(error), _FAILURE)
    except KeyboardInterrupt:
        return 130


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "".join(f"  {name:<{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    return (
        f"usage: accel COMMAND ...\n\nConfigure, launch and inspect PyTorch training.\n\ncommands:\n{rows}\naccel "
        "COMMAND --help shows the options of a command; accel --version prints the version.\n"
    )


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    what = "option" if name.startswith("-") else "command"
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    if name.endswith(".py"):
        hint = f"to start a script: accel launch {name}"
    return f"{what} {name} does not exist; {hint}"


def _complain(who: str, message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{who}: error: {message}\n")
    return code
