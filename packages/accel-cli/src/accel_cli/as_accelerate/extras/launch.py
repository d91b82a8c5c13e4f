"""``accelerate.commands.launch`` for programs that start it themselves, such as TRL's command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from accel_cli.as_accelerate.extras import config
from accel_cli.as_accelerate.extras.arguments import add_option
from accel_cli.as_accelerate.extras.launch_defaults import ABSENT, UNSET, note_given
from accel_cli.commands.launch import main
from accel_state.config.flags import ParsedFlags, parse_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import Resolved, resolve
from accel_state.config.option_types import StringList
from accel_state.config.schema import BoundOption, schema_of, value_of
from accel_state.config.sources import Origin
from accel_state.enums import DistributedType
from accel_state.environment import assign, get, snapshot
from accel_state.errors import ConfigError

_SCRIPT = "training_script"
_ARGUMENTS = "training_script_args"
_OWN = {"config_file": True}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of argparse with the flags of ``accel launch``.

    Args:
        subparsers: the result of ``ArgumentParser.add_subparsers``, to add the command ``launch`` to it.

    Returns:
        The parser; ``launch_command`` takes the namespace that its ``parse_args`` returns. A value that is given has
        the type of its option, and its name is in ``nondefault``; the others have the defaults of Accelerate's parser,
        which decide nothing.
    """
    text = "Start a script on one or many processes (accel launch). Dashes may join words, as in --num-processes."
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser("accel launch", description=text, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("launch", description=text)
    note_given(parser)
    parser.set_defaults(**ABSENT)
    add_option(parser, ["--config_file"], metavar="FILE")
    for bound in schema_of(LaunchConfig).options:
        if bound.flags:
            _add(parser, bound)
        for switch in bound.about.switches:
            add_option(parser, [switch], action="store_true")
    parser.add_argument(_SCRIPT, metavar="SCRIPT")
    parser.add_argument(_ARGUMENTS, nargs=argparse.REMAINDER)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def _add(parser: argparse.ArgumentParser, bound: BoundOption) -> None:
    unset = UNSET.get(_name(bound.flags[0]), False if bound.about.toggle else None)
    if bound.about.toggle:
        add_option(parser, bound.flags, action="store_true", default=unset)
    elif isinstance(bound.option_type, StringList):
        add_option(parser, bound.flags, action="append", metavar="VALUE")
    else:
        add_option(parser, bound.flags, type=_typed(bound, unset), metavar="VALUE", default=unset)


def _typed(bound: BoundOption, unset: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text is unset:  # argparse reads the text of a default, too
            return text
        try:
            value = bound.parse(text, bound.flags[0])
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if value is None else value  # "all" of --gpu_ids, which takes a value of a file back

    return read


def launch_command(args: argparse.Namespace) -> None:
    """Launch the run that a namespace describes, and return when it has ended.

    Raises:
        SystemExit: the run failed, with its exit code.
        AccelError: a value is wrong, or the machine does not fit.
    """
    code = main(launch_words(args), returns=True)
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


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Fill a namespace with the values of the configuration file and the environment.

    Returns:
        The namespace, which is changed; the file's configuration, None without one; and whether the mixed precision
        is the file's.

    Raises:
        ConfigError: values that are wrong, or contradict each other.
    """
    resolved = resolve_namespace(args)
    here = resolved.local()
    for bound in schema_of(LaunchConfig).options:
        if bound.flags:
            setattr(args, _name(bound.flags[0]), value_of(here, bound))
        for switch in bound.about.switches:
            setattr(args, _name(switch), getattr(here, _name(switch), getattr(args, _name(switch), False)))
    defaults = None if resolved.file is None else config.load_config_from_file(resolved.file)
    return args, defaults, resolved.origin("mixed_precision") is Origin.FILE


def resolve_namespace(args: argparse.Namespace) -> Resolved:
    """The configuration of a launch that a namespace describes, with the file and the environment.

    Raises:
        ConfigError: values that are wrong, or contradict each other.
    """
    return resolve(getattr(args, "config_file", None), snapshot(), flags_of(args))


def flags_of(args: argparse.Namespace) -> ParsedFlags:
    """The flags that a namespace stands for, as the launcher reads them."""
    return parse_flags(launch_words(args), _OWN)


def launch_words(args: argparse.Namespace) -> list[str]:
    """The command line of ``accel launch`` that a namespace stands for."""
    words = []
    values = vars(args)
    if values.get("config_file"):
        words += ["--config_file", str(values["config_file"])]
    for bound in schema_of(LaunchConfig).options:
        if bound.flags:
            name = _name(bound.flags[0])
            left_out = "nondefault" in values and name not in values["nondefault"]
            value = values.get(name)
            words += _words(bound, None if left_out and value == UNSET.get(name) else value)
        words += [switch for switch in bound.about.switches if values.get(_name(switch))]
    script = values.get(_SCRIPT)
    return words if script is None else [*words, str(script), *map(str, values.get(_ARGUMENTS) or [])]


def _words(bound: BoundOption, value: Any) -> list[str]:
    flag = bound.flags[0]
    if value is None or (value is False and bound.about.toggle):
        return []
    if bound.about.toggle:
        return [flag]
    several = isinstance(bound.option_type, StringList) and not isinstance(value, str)
    return [
        f"{flag}={item if isinstance(item, str) else bound.option_type.format(item)}"
        for item in (value if several else [value])
    ]


def _name(flag: str) -> str:
    """The attribute of a namespace."""
    return flag.lstrip("-").replace("-", "_")
