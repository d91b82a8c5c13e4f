"""A command whose flags are those of the configuration schema, read as ``accel launch`` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from accel_cli.dialect import Command
from accel_cli.help_pages import write_rows
from accel_state.config.flags import ParsedFlags, parse_flags
from accel_state.errors import ConfigError

__all__ = ["SchemaCommand", "number_of"]


def number_of(given: Mapping[str, Any], flag: str, default: int) -> int:
    """The whole number from 1 that a flag gives, or its default.

    Raises:
        ConfigError: it is no such number.
    """
    text = str(given.get(flag, default))
    if flag in given and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"--{flag} {text} is not a number that it takes; pass a whole number from 1")
    return int(text)


class SchemaCommand(Command):
    """Leaves all words in ``context.args``; the function calls ``read`` with them.

    Attributes:
        usage: what follows the command's name in the line of its usage.
        own: flags of the command itself, with the placeholder of a value that they take, and their help.
        shared: flags of the schema that its help names too.
    """

    usage = "[flags of accel launch]"
    own: Mapping[str, str] = {}
    shared: Mapping[str, str] = {}

    @classmethod
    def taking(cls) -> dict[str, bool]:
        """The command's own flags as ``parse_flags`` takes them: name, and whether a value follows."""
        named = {flag.partition(" ")[0][2:]: " " in flag for flag in cls.own}
        return named | {"help": False, "-h": False}

    @classmethod
    def read(cls, words: Sequence[str]) -> ParsedFlags:
        """Parse the words after the command's name.

        Raises:
            ConfigError: a flag is wrong.
        """
        return parse_flags(words, cls.taking())

    def get_params(self, ctx: Any) -> list[Any]:
        """None: one Typer option per flag of the schema would cost 0.1 s at every start."""
        return []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words for the function, or show help."""
        ctx.args = list(args)
        if not ctx.resilient_parsing and any(word.startswith(("-h", "--h")) for word in args):
            flags = self.read(args)
            if not {"help", "-h", "help_all"}.isdisjoint(flags.others):
                typer.echo(self.help_for(ctx, flags))
                raise typer.Exit
        return args

    def help_for(self, ctx: Any, flags: ParsedFlags) -> str:
        """The help page that the flags ask for."""
        return str(self.get_help(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name."""
        return [self.usage]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the command's own flags, and those of the schema that matter most for it."""
        rows = {**self.own, **self.shared, "-h, --help": "Show this help."}
        write_rows(formatter, "Flags", rows.items())
