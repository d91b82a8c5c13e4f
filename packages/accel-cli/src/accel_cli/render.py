"""Shows facts by topic, tables and sentences: to the width of a terminal, otherwise as plain lines."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from accel_state.host.colors import Colors
from accel_state.messages import folded

__all__ = ["as_text", "difference", "show_facts", "show_table", "show_text", "when"]

Facts = Mapping[str, Mapping[str, Any]]


def show_facts(facts: Facts) -> None:
    """Print names and values under the title of their topic.

    On a terminal long values are folded inside their column. Otherwise each fact is one line of any length, for
    ``grep`` and bug reports.

    Args:
        facts: title → name → value.
    """
    if sys.stdout.isatty():
        _show_on_terminal(facts)
        return
    for title, rows in facts.items():
        print(f"{title}:")
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}")


def _show_on_terminal(facts: Facts) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in facts.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            # As Text, because a value with brackets is not markup.
            table.add_row(Text(f"  {name}"), Text(str(value)))
        console.print(Text(f"{title}:", style="bold"))
        console.print(table)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    bold: int | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """Print rows under a header: with rich on a terminal, otherwise as aligned text.

    Returns the columns that were left out.

    Args:
        columns: the header.
        rows: cells as text, each as many as there are columns.
        left: number of columns that are aligned to the left; the last one always is if it holds words.
        bold: index of a row to make stand out on a terminal.
        spare: columns that are left out, the first one first, on a terminal that is too narrow for all.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    without = _too_many(dict(zip(columns, widths, strict=True)), spare) if sys.stdout.isatty() else []
    kept = [at for at, name in enumerate(columns) if name not in without]
    columns, rows = [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
    words = [at for at in range(len(columns)) if at < left or any(_is_words(row[at]) for row in rows)]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="cyan", padding=(0, 2, 0, 0))
        for at, name in enumerate(columns):
            last = at + 1 == len(columns)
            table.add_column(
                Text(name),
                justify="left" if at in words else "right",
                no_wrap=at < left and not last,
                overflow="fold" if last else "ellipsis",
            )
        for at, row in enumerate(rows):
            table.add_row(*map(Text, row), style="bold" if at == bold else None)
        Console(highlight=False).print(table)
        return without
    for row in (columns, *rows):
        cells = (
            cell.ljust(width) if at in words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    return without


def _too_many(widths: Mapping[str, int], spare: Sequence[str]) -> list[str]:
    """The first of the spare columns, as many as do not fit on the terminal."""
    over = sum(widths.values()) + 2 * len(widths) - shutil.get_terminal_size().columns
    without: list[str] = []
    for name in spare:
        if over <= 0:
            break
        without.append(name)
        over -= widths[name] + 2
    return without


def _is_words(cell: str) -> bool:
    return bool(cell) and not any(character.isdigit() for character in cell) and cell not in ("-", "N/A")


def show_text(text: str, stream: TextIO | None = None) -> None:
    """Print lines of sentences, by default to standard output: on a terminal folded between words."""
    stream = stream or sys.stdout
    print(folded(text, stream), file=stream)


def when(seconds: float) -> str:
    """Date and time of this machine's clock, from seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def as_text(value: Any) -> str:
    """A value of a configuration as a file has it, on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def difference(before: str, after: str, names: tuple[str, str], colors: Colors, context: int = 3) -> str:
    """A unified diff that ``patch`` reads, if it is not coloured.

    Args:
        before: the text before the change.
        after: the text after it.
        names: of their files.
        colors: whether to colour it.
        context: number of lines around each change.
    """
    found = []
    for line in difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names, n=context):
        kind = {"+": "green", "-": "red", "@": "cyan"}.get(line[0])
        text = line.rstrip("\n")
        found.append((colors(kind, text) if kind else text) + "\n")
        if not line.endswith("\n"):
            found.append("\\ No newline at end of file\n")
    return "".join(found)
