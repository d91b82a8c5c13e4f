"""Running a Typer application as one command of ``accel``."""

from __future__ import annotations

from collections.abc import Sequence

import typer

__all__ = ["HELP", "run_app"]

HELP = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command."""


def run_app(app: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """Run ``app``, which prints its own messages about wrong usage.

    Args:
        app: the application.
        name: its name in the help.
        arguments: the arguments after the name.

    Returns:
        The exit code. Exceptions of this project propagate.
    """
    try:
        app(args=list(arguments), prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
