"""``accelerate.commands.launch`` for programs that start it themselves, such as TRL's command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accel_cli.commands.launch import main
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.enums import DistributedType
from accel_state.environment import assign, get

__all__ = ["PrepareForLaunch", "launch_command", "launch_command_parser"]

_SCRIPT = "training_script"
_ARGUMENTS = "training_script_args"


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of argparse with the flags of ``accel launch``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to become the command ``launch`` of it.

    Returns:
        The parser; ``launch_command`` takes the namespace that its ``parse_args`` returns. Values stay as typed: the
        launcher reads and checks them.
    """
    text = "Start a script on one or many processes (accel launch)."
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser("accel launch", description=text, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("launch", description=text)
    parser.add_argument("--config_file", "--config-file", default=None, metavar="FILE")
    for name, spellings, takes_value in _flags():
        words = sorted(
            {*spellings, *(word.replace("_", "-") for word in spellings)}, key=lambda word: (len(word), word)
        )
        if takes_value:
            parser.add_argument(*words, dest=name, default=None, metavar="VALUE")
        else:
            parser.add_argument(*words, dest=name, action="store_const", const=True, default=None)
    parser.add_argument(_SCRIPT, metavar="SCRIPT")
    parser.add_argument(_ARGUMENTS, nargs=argparse.REMAINDER)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Launch what the namespace says, and return when it has ended.

    Raises:
        SystemExit: the run failed, with its exit code.
        AccelError: a value is wrong, or the machine does not fit.
    """
    code = main(_words(args), returns=True)
    if code:
        sys.exit(code)


class PrepareForLaunch:
    """A function for a started process, called with the process's index on its machine.

    It finds its rank in the environment: `RANK` is the index plus `NPROC` times `NODE_RANK`. The program that starts
    the processes sets `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

    Args:
        launcher: the function.
        distributed_type: the type of the world; "NO": one process.
        debug: a world on the CPU of this machine, whatever the type.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as the process `index`."""
        if self.debug or self.distributed_type is not DistributedType.NO:
            rank = int(get("NPROC", "1")) * int(get("NODE_RANK", "0")) + index
            assign(RANK=rank, LOCAL_RANK=index)
        assign(FORK_LAUNCHED=1)
        self.launcher(*args)


def _flags() -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Attribute of the namespace, spellings, and whether a value follows."""
    for bound in schema_of(LaunchConfig).options:
        if bound.flags:
            yield bound.flags[0].lstrip("-"), bound.flags, not bound.about.toggle
        for switch in bound.about.switches:
            yield switch.lstrip("-"), (switch,), False


def _words(args: argparse.Namespace) -> list[str]:
    words = []
    values = vars(args)
    if values.get("config_file"):
        words += ["--config_file", str(values["config_file"])]
    for name, spellings, takes_value in _flags():
        value = values.get(name)
        if value is None or value is False:
            continue
        words += [f"{spellings[0]}={value}"] if takes_value else [spellings[0]]
    return [*words, str(values[_SCRIPT]), *map(str, values.get(_ARGUMENTS) or [])]
