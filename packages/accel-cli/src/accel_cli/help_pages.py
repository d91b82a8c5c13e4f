"""The layout of every help page: usage, description, and tables of names and explanations."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from accel_cli.colors import Colors, colors_for

__all__ = ["Section", "help_page", "page_width"]

Section = tuple[str, Sequence[tuple[str, str]]]
"""A title, and rows of a name with its explanation."""

_INDENT = 30


def page_width() -> int:
    """Characters per line: the width of the terminal, at most 120; 100 if there is none."""
    return min(120, shutil.get_terminal_size((100, 24)).columns)


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
        usage: what follows ``usage:``.
        description: paragraphs separated by blank lines; indented paragraphs keep their lines.
        sections: titles with their rows.
        epilog: paragraphs after the tables.
        width: characters per line, by default ``page_width()``.
        colors: by default those of standard output.
    """
    width = page_width() if width is None else width
    colors = colors_for() if colors is None else colors
    blocks = [f"{colors('bold', 'usage:')} {usage}\n"]
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
        keeps_lines = any(line.startswith((" ", "\t")) for line in paragraph.splitlines())
        wrapped.append(paragraph if keeps_lines else textwrap.fill(paragraph, width))
    return "\n\n".join(wrapped) + "\n"


def _row(name: str, text: str, width: int, colors: Colors) -> str:
    lines = textwrap.wrap(text, max(30, width - _INDENT)) or [""]
    first = f"  {name}"
    shown = f"  {colors('cyan', name)}"
    if len(first) < _INDENT - 1:
        shown += " " * (_INDENT - len(first)) + lines.pop(0)
    return "\n".join([shown.rstrip(), *(" " * _INDENT + line for line in lines)]) + "\n"
