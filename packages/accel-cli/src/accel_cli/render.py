"""Shows facts by topic: with rich on a terminal, otherwise as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["show_facts"]

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
