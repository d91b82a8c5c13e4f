"""The layout of every help page: usage, description, and tables of names and explanations."""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from accel_cli.colors import Colors, colors_for

__all__ = ["Section", "help_page", "page_width"]

Section = tuple[str, Sequence[tuple[str, str]]]
"""A title, and rows of a name with its explanation."""

_INDENT = 30
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


def help_page(
    usage: str,
    description: str,
    sections: Iterable[Section],
    *,
    epilog: str = "",
    width: int | None = None,
    colors: Colors | None = None,
) -> str:
    """One help page, ending with a line break.

    Args:
        usage: the text after ``usage:``.
        description: paragraphs separated by blank lines; indented paragraphs keep their lines.
        sections: titles with their rows.
        epilog: paragraphs after the tables.
        width: characters per line, by default ``page_width()``.
        colors: by default those of standard output.
    """
    width = page_width() if width is None else width
    colors = colors_for() if colors is None else colors
    wrapped = _folded(f"usage: {usage}", width, "  ").removeprefix("usage:")
    blocks = [f"{colors('bold', 'usage:')}{wrapped}\n"]
    if description:
        blocks.append(_paragraphs(description, width))
    for title, rows in sections:
        lines = "".join(_row(name, text, width, colors) for name, text in rows)
        blocks.append(f"{colors('bold', f'{title}:')}\n{lines}")
    if epilog:
        blocks.append(_paragraphs(epilog, width))
    return "\n".join(blocks)


def _paragraphs(text: str, width: int) -> str:
    wrapped = []
    for paragraph in textwrap.dedent(text).strip("\n").split("\n\n"):
        lines = paragraph.splitlines()
        if any(line.startswith((" ", "\t")) for line in lines):
            wrapped.append("\n".join(_folded(line, width, "      ") for line in lines))
        else:
            wrapped.append(_folded(" ".join(paragraph.split()), width, ""))
    return "\n\n".join(wrapped) + "\n"


def _folded(text: str, width: int, indent: str) -> str:
    """The text in lines that end between words; those after the first are indented."""
    if len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _row(name: str, text: str, width: int, colors: Colors) -> str:
    indent = _INDENT if width >= _NARROW else 6
    folded = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    lines = folded or [""]
    first = f"  {name}"
    shown = f"  {colors('cyan', name)}"
    if len(first) < indent - 1:
        shown += " " * (indent - len(first)) + lines.pop(0)
    return "\n".join([shown.rstrip(), *(" " * indent + line for line in lines)]) + "\n"
