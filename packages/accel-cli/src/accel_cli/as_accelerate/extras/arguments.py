"""Parsers of argparse for our commands, whose namespaces clients of Accelerate make and change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import typer.main

from accel_cli.dialect import App

__all__ = ["add_option", "parser_of", "run"]


def add_option(parser: argparse.ArgumentParser, flags: Sequence[str], **settings: Any) -> None:
    """Add an option that may be spelled with dashes or underscores; help shows it as it is declared.

    Args:
        parser: the parser that it is added to.
        flags: spellings with dashes in front, the first of which names the attribute.
        **settings: as for ``ArgumentParser.add_argument``.
    """
    plain = [flag for flag in flags if not flag.startswith("--")]
    shown = [flag for flag in flags if flag.startswith("--")]
    spelled = {
        f"--{name}" for flag in shown for name in (flag[2:].replace("-", "_"), flag[2:].replace("_", "-"))
    }
    words = [*plain, *shown, *sorted(spelled.difference(shown))]
    name = next(iter(shown or plain)).lstrip("-").replace("-", "_")
    action = parser.add_argument(*words, dest=name, **settings)
    action.option_strings = [*plain, *(flag.replace("-", "_").replace("__", "--", 1) for flag in shown)]


def parser_of(app: App, name: str, subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of argparse with the arguments of one of our commands.

    Args:
        app: the command.
        name: its name.
        subparsers: the result of ``ArgumentParser.add_subparsers``, to add a command to it.
    """
    command = typer.main.get_command(app)
    text = (command.help or "").partition("\n\n")[0]
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser(f"accel {name}", description=text, allow_abbrev=False)
    else:
        parser = subparsers.add_parser(name, description=text)
    for param in command.params:
        _add(parser, param)
    return parser


def _add(parser: argparse.ArgumentParser, param: Any) -> None:
    about = (getattr(param, "help", None) or "").replace("%", "%%")
    if param.param_type_name == "argument":
        words = "*" if param.nargs == -1 else None if param.required else "?"
        parser.add_argument(param.name, help=about, nargs=words)
    elif param.is_flag:
        add_option(parser, param.opts, action="store_true", help=about)
    elif param.multiple:
        add_option(parser, param.opts, action="extend", nargs="+", help=about)
    else:
        kind = type(param.default) if isinstance(param.default, int | float) else str
        add_option(parser, param.opts, type=kind, default=param.default, required=param.required, help=about)


def run(app: App, args: argparse.Namespace) -> int:
    """Run one of our commands in this process with the values of a namespace.

    Returns:
        Its exit code.

    Raises:
        AccelError: a value is wrong, or the command failed.
    """
    command = typer.main.get_command(app)
    return int(command.main(args=_words(command, args), standalone_mode=False) or 0)


def _words(command: Any, args: argparse.Namespace) -> list[str]:
    words: list[str] = []
    given: list[str] = []
    for param in command.params:
        flag = next((word for word in param.opts if word.startswith("--")), param.opts[0])
        value = getattr(args, flag.lstrip("-").replace("-", "_"), None)
        if value is None or value is False or value == []:
            continue
        if param.param_type_name == "argument":
            given += map(str, value if isinstance(value, list) else [value])
        elif param.is_flag:
            words.append(flag)
        else:
            words += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    return [*words, "--", *given] if given else words
