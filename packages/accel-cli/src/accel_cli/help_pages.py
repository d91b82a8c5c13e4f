"""Errors, the width of help pages, and pages that are not made of Typer's parameters, written by its formatter."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from accel_state.host.colors import colors_for
from accel_state.messages import folded

__all__ = ["Section", "help_page", "page_width", "placeholder", "show_error", "with_examples", "write_rows"]

Section = tuple[str, Sequence[tuple[str, str]]]
"""A title, and rows of a name with its explanation."""

_OF_TYPE = {"int": "N", "float": "X", "path": "FILE", "bool": "true|false", "boolorname": "true|false|NAME"}
_OF_NAME = {"file": "FILE", "hostfile": "FILE", "path": "PATH", "dir": "DIR"}
_NARROW = 80
"""Below this width explanations are in the lines after their names."""


def page_width() -> int:
    """Characters per line: the width of the terminal, at most 120; 100 if there is none.

    Standard output may be a pipe to a program that shows it in the same terminal (``| head``, ``| less``).
    """
    width = shutil.get_terminal_size((0, 0)).columns
    for descriptor in (2, 0):
        if not width:
            with contextlib.suppress(OSError):  # no terminal either
                width = os.get_terminal_size(descriptor).columns
    return min(120, width or 100)


def show_error(who: str, message: str) -> None:
    """Write an error of a command to standard error."""
    colors = colors_for(sys.stderr)
    named = f"{colors('bold', who)}: {colors('red', 'error')}: "
    text = folded(f"{who}: error: {message}\n", sys.stderr)
    sys.stderr.write(text.replace(f"{who}: error: ", named, 1))


def placeholder(kind: str, name: str, choices: bool) -> str:
    """What stands for a value in help: ``N``, ``X``, ``NAME``, ``FILE``, ``DIR``, ``PATH`` or ``TEXT``.

    Args:
        kind: name of its type.
        name: of the option, which says whether it is a file.
        choices: the value is one of several words.
    """
    if choices and kind != "BoolOrName":
        return "NAME"
    last = re.split(r"[._]", name)[-1]
    return _OF_TYPE.get(kind.lower()) or _OF_NAME.get(last, "TEXT")


def with_examples(text: str) -> str:
    """The text, with the mark before indented paragraphs for which Typer keeps their lines."""
    return re.sub(r"(^|\n\n)(?= )", "\\1\b\n", text)


def write_rows(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Write a table of names and explanations with Typer's formatter."""
    with formatter.section(title):
        formatter.write_dl(rows, col_max=28 if formatter.width >= _NARROW else 4)


def help_page(
    command: str,
    arguments: str,
    about: str,
    sections: Iterable[Section],
    *,
    epilog: str = "",
    width: int | None,
) -> str:
    """One help page, ending with a line break.

    Args:
        command: the command.
        arguments: what follows it in the line of its usage.
        about: paragraphs separated by blank lines; indented paragraphs keep their lines.
        sections: titles with their rows.
        epilog: a paragraph after the tables.
        width: characters per line; None: ``page_width()``.
    """
    formatter = typer.Context.formatter_class(width=width or page_width())
    formatter.write_usage(command, arguments)
    _write_text(formatter, about)
    for title, rows in sections:
        write_rows(formatter, title, rows)
    _write_text(formatter, epilog)
    return str(formatter.getvalue())


def _write_text(formatter: Any, text: str) -> None:
    if text:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(with_examples(text))
