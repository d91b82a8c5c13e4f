"""Shared behaviour of all commands: spellings of flags, help pages, messages about a wrong command line.

A command is a module of ``accel_cli.commands`` with an ``App`` named ``app``. Its functions return None or an exit
code, and raise this project's errors; ``accel_cli.app`` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from accel_cli.help_pages import Section, help_page
from accel_state.messages import did_you_mean

__all__ = ["App", "Command", "Group", "UsageError", "describe_usage_error"]

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of Typer's errors about a command line; Typer does not export it."""

_EXTRA = re.compile(r"got unexpected extra arguments?(?:\(s\))? \((.*)\)")
_CHOICES = re.compile(r"(?:value error, )?(?:'.*?'|\".*?\") is not one of (.*)")
_EXPECTATIONS = (
    (
        re.compile(r"input should be a valid integer.*|'.*' is not a valid (?:int|integer)(?: range)?"),
        "expected an integer",
    ),
    (
        re.compile(r"input should be a valid number.*|'.*' is not a valid float(?: range)?"),
        "expected a number",
    ),
    (re.compile(r"input should be greater than or equal to (\S+)"), r"expected at least \1"),
    (re.compile(r"input should be less than or equal to (\S+)"), r"expected at most \1"),
)
"""Texts of Typer and of pydantic, with which it converts values, and ours."""


def describe_usage_error(error: Any) -> str:
    """A ``UsageError`` in the words of this project: the value, what is expected, and the nearest flag."""
    option = getattr(error, "option_name", None)
    if option is not None and getattr(error, "possibilities", None) is not None:
        flags = [flag for flag in _flags(error.ctx) if flag.startswith("--")]
        return f"flag {option} does not exist" + did_you_mean(
            option.replace("-", "_").replace("__", "--", 1),
            flags,
            f"; {error.ctx.command_path} --help lists the flags",
        )
    param = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and param is not None:
        return f"{_shown(param)} is missing; {error.ctx.command_path} --help shows what it is"
    message = str(error.message).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    if param is None:
        extra = _EXTRA.fullmatch(message)
        if extra is None:
            return message
        return f"unexpected argument {extra[1]!r}; {error.ctx.command_path} --help lists the arguments"
    typed = _typed(param, getattr(error, "words", ()))
    message = _expectation(message, typed)
    return f"{_shown(param)} is {typed!r}; {message}" if typed is not None else f"{_shown(param)}: {message}"


def _expectation(message: str, typed: str | None) -> str:
    """The expected value, from Typer's or pydantic's text; the value itself is in the message already."""
    choices = _CHOICES.fullmatch(message)
    if choices is not None:
        known = [name.strip("'\"") for name in choices[1].split(", ")]
        near = did_you_mean(typed, known) if typed else ""
        return f"expected one of {', '.join(known)}{near}"
    for pattern, words in _EXPECTATIONS:
        found = pattern.fullmatch(message)
        if found is not None:
            return found.expand(words)
    return message


class Command(TyperCommand):
    """One command: dashes and underscores in its flags are equivalent, and its help is a ``help_page``.

    Attributes:
        choices: parameter to the words that it can be, where its type does not say it; for completion.
    """

    choices: Mapping[str, Sequence[str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        words = _as_declared(args, self.get_params(ctx))
        try:
            return super().parse_args(ctx, list(words))
        except UsageError as error:
            error.words = words  # type: ignore[attr-defined] # for the message; Typer does not keep them
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        formatter.write(_page(self, ctx, []))


class Group(TyperGroup):
    """A command with subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words up to the name of the subcommand."""
        own = next((at for at, word in enumerate(args) if not word.startswith("-")), len(args))
        return super().parse_args(ctx, [*_as_declared(args[:own], self.get_params(ctx)), *args[own:]])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand that the first word names.

        Raises:
            UsageError: there is none; the message has the nearest names.
        """
        name = args[0].replace("_", "-")
        known = self.list_commands(ctx)
        if name not in known and not ctx.resilient_parsing:
            hint = did_you_mean(name, known, f"; the commands are {', '.join(known)}")
            ctx.fail(f"command {args[0]} does not exist{hint}")
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page, with a table of the subcommands."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            rows.append((name, command.get_short_help_str(limit=200)))
        formatter.write(_page(self, ctx, [("commands", rows)]))


class App(typer.Typer):
    """A Typer application in this project's dialect; the keyword arguments are those of ``typer.Typer``."""

    def __init__(self, **settings: Any) -> None:
        ours: dict[str, Any] = {
            "cls": Group,
            "add_completion": False,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "context_settings": {"help_option_names": ["-h", "--help"]},
        }
        super().__init__(**(ours | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Declare a function as a command; the keyword arguments are those of ``typer.Typer.command``."""
        ours: dict[str, Any] = {"cls": Command, "context_settings": {"help_option_names": ["-h", "--help"]}}
        return super().command(name, **(ours | settings))


def _plain(flag: str) -> str:
    return flag.replace("_", "-")


def _as_declared(words: Sequence[str], params: Iterable[Any]) -> list[str]:
    """The words with each flag spelled as its declaration spells it."""
    spellings = {
        _plain(flag): flag
        for param in params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    found: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*found, *words[at:]]
        flag, equals, value = word.partition("=")
        found.append(spellings.get(_plain(flag), flag) + equals + value if flag.startswith("--") else word)
    return found


def _shown(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())


def _typed(param: Any, words: Sequence[str]) -> str | None:
    """The text that was typed for an option; None for an argument."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in param.opts and param.param_type_name == "option":
            return value if equals else next(iter(words[at + 1 :]), "")
    return None


def _flags(context: Any) -> list[str]:
    return [
        flag for param in context.command.get_params(context) for flag in (*param.opts, *param.secondary_opts)
    ]


def _page(command: Any, context: Any, more: Sequence[Section]) -> str:
    arguments: list[tuple[str, str]] = []
    panels: dict[str, list[tuple[str, str]]] = {"options": []}
    pieces = ["[options]"]
    for param in command.get_params(context):
        if param.param_type_name == "option":
            record = param.get_help_record(context)
            if record is not None:
                panels.setdefault(getattr(param, "rich_help_panel", None) or "options", []).append(record)
            continue
        name = _shown(param) + (" ..." if param.nargs == -1 else "")
        arguments.append((_shown(param), param.help or ""))
        pieces.append(name if param.required else f"[{name}]")
    if more:
        pieces.append("COMMAND ...")
    options = panels.pop("options")
    sections: list[Section] = [*([("arguments", arguments)] if arguments else []), *more, *panels.items()]
    usage = f"{context.command_path} {' '.join(pieces)}"
    return help_page(
        usage, command.help or "", [*sections, ("options", options)], epilog=command.epilog or ""
    )
