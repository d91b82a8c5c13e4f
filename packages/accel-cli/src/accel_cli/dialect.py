"""Shared behaviour of all commands: spellings of words, the width of help pages, messages about a wrong command line.

A command is a module of ``accel_cli.commands`` with an ``App`` named ``app``. Its functions return None or an exit
code, and raise this project's errors; ``accel_cli.app`` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from accel_cli.help_pages import page_width, placeholder, with_examples, write_rows
from accel_state.messages import did_you_mean

__all__ = ["CONTEXT", "App", "Command", "CommandGroup", "UsageError", "describe_usage_error", "repeated"]

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of Typer's errors about a command line; Typer does not export it."""

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}
"""Settings of all commands: in flags, dashes and underscores are equivalent."""


def describe_usage_error(error: Any) -> str:
    """A ``UsageError`` as this project words errors: the flag, its value, what is expected, and the nearest name."""
    param = getattr(error, "param", None)
    if getattr(error, "possibilities", None) is not None:
        nearest = did_you_mean(
            error.option_name, error.possibilities, f"; {error.ctx.command_path} --help lists the flags"
        )
        return f"flag {error.option_name} does not exist{nearest}"
    if param is None or not hasattr(error.__cause__, "errors"):
        message = " ".join(error.format_message().split()).rstrip(".")
        if (told := getattr(param, "help", None)) and "Choose from" not in message:
            message += f" ({told.partition('. ')[0].rstrip('.')})"
        if error.ctx is not None and not message.endswith("?"):
            message += f"; {error.ctx.command_path} --help shows what it takes"
        return f"{message[:1].lower()}{message[1:]}"
    (problem, *_) = error.__cause__.errors()  # pydantic's, by which Typer converts values
    choices = [str(choice.value) for choice in param.type_descriptor.choices or ()]
    expected = problem["msg"][:1].lower() + problem["msg"][1:]
    if choices:
        expected = f"expected one of {', '.join(choices)}{did_you_mean(problem['input'], choices)}"
    return f"{param.opts[0]} is {problem['input']!r}; {expected}"


def repeated(words: Sequence[str], flag: str, belongs: Callable[[str], bool]) -> list[str]:
    """The words with the flag before each of the values that follow it, which Accelerate's commands take in a row.

    Args:
        words: a command line.
        flag: the flag.
        belongs: whether a word can be one of its values.
    """
    found: list[str] = []
    listing = False
    for word in words:
        value = belongs(word)
        if listing and value and found[-1] != flag:
            found.append(flag)
        found.append(word)
        listing = word == flag or (listing and value)
    return found


class _Pages:
    """Typer's help pages, as wide as the terminal."""

    def __init__(self, *, help: str | None = None, **settings: Any) -> None:
        super().__init__(help=with_examples(help or ""), **settings)  # type: ignore[call-arg]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        formatter.width = page_width()
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Typer's, with ``MODEL`` for ``{model}``."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "").upper() for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters as ``accel launch --help`` writes the options of the schema."""
        tables: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            words = getattr(self, "choices", {}).get(param.name, ())
            tables[param.param_type_name].append(_described(param, words))
        for kind, rows in tables.items():
            if rows:
                write_rows(formatter, f"{kind.capitalize()}s", rows)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class Command(_Pages, TyperCommand):
    """One command.

    Attributes:
        choices: parameter to the words that it can be, where its type does not say it; for completion.
    """

    choices: Mapping[str, Sequence[str]] = {}


def _described(param: Any, words: Sequence[str]) -> tuple[str, str]:
    """A parameter with the placeholder of its value, and its help."""
    kind = param.type_descriptor
    choices = [str(choice.value) for choice in kind.choices or ()]
    notes = [param.help or ""]
    if choices:
        notes.append(f"One of {', '.join(choices)}.")
    if param.param_type_name == "argument":
        return param.name.upper(), " ".join(notes)
    if param.default:
        notes.append(f"Default: {getattr(param.default, 'value', param.default)}.")
    flags = ", ".join(sorted(param.opts, key=lambda flag: flag.startswith("--")))
    if not param.is_flag:
        type_name = getattr(kind.annotation, "__name__", "")
        flags += f" {placeholder(type_name, param.name, bool(choices or words))}"
    return flags, " ".join(notes)


class CommandGroup(_Pages, TyperGroup):
    """A command with subcommands."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of this name, in either spelling; None if there is none."""
        return super().get_command(ctx, cmd_name.replace("_", "-"))


class App(typer.Typer):
    """A Typer application in this project's dialect; the keyword arguments are those of ``typer.Typer``."""

    def __init__(self, **settings: Any) -> None:
        ours: dict[str, Any] = {
            "cls": CommandGroup,
            "add_completion": False,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "context_settings": CONTEXT,
        }
        super().__init__(**(ours | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Declare a function as a command; the keyword arguments are those of ``typer.Typer.command``."""
        ours: dict[str, Any] = {"cls": Command, "context_settings": CONTEXT}
        return super().command(name, **(ours | settings))
