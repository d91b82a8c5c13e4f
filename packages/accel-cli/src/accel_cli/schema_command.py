"""A command whose flags are those of the configuration schema, read as ``accel launch`` reads them."""

from __future__ import annotations

from typing import Any

from typer.core import CompletionItem  # type: ignore[attr-defined] # Typer does not export it

from accel_cli.dialect import Command

__all__ = ["SchemaCommand"]


class SchemaCommand(Command):
    """Leaves all words in ``context.args``; the function has ``accel_state.config.flags`` parse them.

    Attributes:
        own_flags: flags of the command itself, with their dashes, and their help; for completion.
        own_values: those of them that take a value.
    """

    own_flags: dict[str, str] = {}
    own_values: tuple[str, ...] = ("--config_file",)

    def get_params(self, ctx: Any) -> list[Any]:
        """None: one Typer option per flag of the schema would cost 0.1 s at every start."""
        return []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words for the function."""
        ctx.args = list(args)
        return args

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Flags, choices and topics, for shells that Typer answers itself (PowerShell)."""
        from accel_cli.completion import complete_flags

        found = complete_flags(ctx.args, incomplete, self.own_flags, self.own_values)
        return [CompletionItem(item.value, help=item.help) for item in found or ()]
